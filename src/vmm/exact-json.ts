/**
 * JSON with exact integers. `JSON.parse` rounds what does not fit a double; a host address or a
 * bitmap word that is rounded reads other memory, silently. Here an integer is a number when that
 * is exact, else a bigint, and anything else that is written as a number (1.5, 1e3, -0) stays as
 * its text.
 */
import { parse, stringify } from 'lossless-json';
import { z } from 'zod';
import { err, ok, type Result } from '../result.ts';
import { badAnswer, type VmmError } from './errors.ts';

const integerText = /^(?:0|-?[1-9][0-9]*)$/;
const u64Max = 2n ** 64n - 1n;

/** A JSON number that is not an integer in its plain form. No schema here accepts one. */
export class InexactNumber {
  readonly text: string;
  constructor(text: string) {
    this.text = text;
  }
  toString(): string {
    return this.text;
  }
}

function exactNumber(text: string): number | bigint | InexactNumber {
  if (!integerText.test(text)) return new InexactNumber(text);
  const value = Number(text);
  return Number.isSafeInteger(value) ? value : BigInt(text);
}

/** Parses a whole JSON text. Fails on anything that is not one JSON value. */
export function parseExact(text: string, what: string): Result<unknown, VmmError> {
  try {
    return ok(parse(text, null, exactNumber));
  } catch (error) {
    return err(badAnswer(what, '', `is not JSON: ${describe(error)}`));
  }
}

/** JSON text; a bigint becomes a plain integer. */
export function stringifyExact(value: unknown): string {
  const text = stringify(value);
  if (text === undefined) throw new TypeError('not a JSON value');
  return text;
}

/** Checks a parsed answer; the first problem is reported with the path of its field. */
export function checked<T>(
  schema: z.ZodType<T>,
  value: unknown,
  what: string,
): Result<T, VmmError> {
  const parsed = schema.safeParse(value);
  if (parsed.success) return ok(parsed.data);
  const issue = parsed.error.issues[0];
  const field = fieldPath(issue?.path ?? []);
  return err(badAnswer(what, field, issue?.message ?? 'does not fit the schema'));
}

function fieldPath(path: readonly PropertyKey[]): string {
  let text = '';
  for (const step of path) {
    if (typeof step === 'number') text += `[${step}]`;
    else text += text === '' ? String(step) : `.${String(step)}`;
  }
  return text;
}

/** An unsigned 64-bit integer, exact. */
export const u64 = z.custom<number | bigint>(isU64, { error: notU64 }).transform((v) => BigInt(v));

/** A non-negative integer below 2^53. */
export const safeCount = z
  .custom<number>((v) => typeof v === 'number' && Number.isSafeInteger(v) && v >= 0, {
    error: (issue) => `must be an integer from 0 to 2^53 - 1, got ${shown(issue.input)}`,
  })
  .transform((v) => v);

function isU64(value: unknown): boolean {
  if (typeof value === 'number') return Number.isSafeInteger(value) && value >= 0;
  return typeof value === 'bigint' && value >= 0n && value <= u64Max;
}

function notU64(issue: { readonly input?: unknown }): string {
  return `must be an unsigned 64-bit integer, got ${shown(issue.input)}`;
}

/** A value as it may appear in a message: short, one line. */
export function shown(value: unknown): string {
  if (value === undefined) return 'nothing';
  if (value instanceof InexactNumber) return value.text.slice(0, 40);
  if (typeof value === 'bigint') return value.toString().slice(0, 40);
  const text = typeof value === 'string' ? JSON.stringify(value) : kindOf(value);
  return text.length > 60 ? `${text.slice(0, 60)}…` : text;
}

function kindOf(value: unknown): string {
  if (value === null) return 'null';
  if (typeof value === 'number' || typeof value === 'boolean') return String(value);
  return Array.isArray(value) ? 'an array' : `a value of type ${typeof value}`;
}

function describe(error: unknown): string {
  const text = error instanceof Error ? error.message : String(error);
  return text.length > 160 ? `${text.slice(0, 160)}…` : text;
}
