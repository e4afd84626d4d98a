import type { Context } from 'hono';
import { z } from 'zod';

/** A refusal as Firecracker answers it: status 400 and `{"fault_message": …}`. */
export class VmmFault extends Error {
  override readonly name = 'VmmFault';
}

export const notBeforeStart =
  'The requested operation is not supported before starting the microVM.';
export const notAfterStart = 'The requested operation is not supported after starting the microVM.';

export function refuse(c: Context, message: string): Response {
  return c.json({ fault_message: message }, 400);
}

export const noContent = (c: Context): Response => c.body(null, 204);

/** A response of JSON text that is already printed: 64-bit integers keep all their digits. */
export function jsonText(c: Context, text: string): Response {
  return c.body(text, 200, { 'content-type': 'application/json' });
}

/** The request's body, checked; anything wrong is a `VmmFault` that says what and where. */
export async function parseBody<T extends z.ZodType>(c: Context, schema: T): Promise<z.infer<T>> {
  const what = 'An error occurred when deserializing the json body of a request';
  let value: unknown;
  try {
    value = JSON.parse(await c.req.text());
  } catch (error) {
    throw new VmmFault(`${what}: ${error instanceof Error ? error.message : String(error)}.`);
  }
  return checked(schema, value, what);
}

export function parseQuery<T extends z.ZodType>(c: Context, schema: T): z.infer<T> {
  return checked(schema, c.req.query(), 'The query of the request is wrong');
}

function checked<T extends z.ZodType>(schema: T, value: unknown, what: string): z.infer<T> {
  const parsed = schema.safeParse(value);
  if (!parsed.success) {
    const issues = parsed.error.issues.map((issue) => {
      const at = issue.path.join('.');
      return at === '' ? issue.message : `${at}: ${issue.message}`;
    });
    throw new VmmFault(`${what}: ${issues.join('; ')}.`);
  }
  return parsed.data;
}
