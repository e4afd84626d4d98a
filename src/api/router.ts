/** The one way to make a router: validation, limits and errors are the same on every route. */
import { OpenAPIHono } from '@hono/zod-openapi';
import type { HttpBindings } from '@hono/node-server';
import type { Context, MiddlewareHandler } from 'hono';
import { HTTPException } from 'hono/http-exception';
import type { z } from 'zod';
import type { Logger } from '../observability/log.ts';
import { Failure, type FailureDetail } from '../result.ts';
import type { Principal } from './auth.ts';
import { refused, statusOf, toProblem } from './problem.ts';

export interface ApiEnv {
  Bindings: Partial<HttpBindings>;
  Variables: {
    principal: Principal;
    requestId: string;
    /** The whole body, read and counted by `limitBody`; null where there is none. */
    body: Uint8Array | null;
  };
}

function pointer(path: readonly PropertyKey[]): string {
  return path
    .map((step) => `/${String(step).replaceAll('~', '~0').replaceAll('/', '~1')}`)
    .join('');
}

interface Invalid extends FailureDetail {
  readonly kind: 'request-invalid';
  readonly errors: readonly { readonly pointer: string; readonly detail: string }[];
}

function toInvalid(target: string, error: z.ZodError): Invalid {
  const errors = error.issues.slice(0, 50).map((issue) => ({
    pointer: `/${target}${pointer(issue.path)}`,
    detail: issue.message,
  }));
  const first = errors[0];
  const more = errors.length > 1 ? ` (and ${errors.length - 1} more)` : '';
  const message = `${first?.pointer ?? `/${target}`}: ${first?.detail ?? 'invalid'}${more}`;
  return { kind: 'request-invalid', message, errors };
}

/** A router that refuses invalid input with every problem named, as `request-invalid`. */
export function newRouter(): OpenAPIHono<ApiEnv> {
  return new OpenAPIHono<ApiEnv>({
    defaultHook: (result) => {
      if (!result.success) throw new Failure(toInvalid(result.target, result.error));
    },
  });
}

export function problemAnswer(c: Context<ApiEnv>, failure: FailureDetail): Response {
  const document = toProblem(failure, c.get('requestId'));
  const status = statusOf(failure.kind);
  if (status === 429 || status === 503) c.header('Retry-After', '1');
  return c.body(JSON.stringify(document), status, {
    'Content-Type': 'application/problem+json',
  });
}

/**
 * Turns everything that handlers throw into a problem document; only bugs are logged, with their
 * cause.
 */
export function onError(logger: Logger): (error: Error, c: Context<ApiEnv>) => Response {
  return (error, c) => {
    if (error instanceof Failure) return problemAnswer(c, (error as Failure).detail);
    if (error instanceof HTTPException && error.status < 500) {
      return problemAnswer(c, { kind: 'malformed-body', message: error.message });
    }
    const requestId = c.get('requestId');
    logger.error({ err: error, requestId }, 'a request failed unexpectedly');
    const message = `this is a bug; the log has the cause under request ${requestId}`;
    return problemAnswer(c, { kind: 'internal', message });
  };
}

const hasBody = new Set(['POST', 'PUT', 'PATCH', 'DELETE']);

async function readUpTo(stream: ReadableStream<Uint8Array>, max: number): Promise<Uint8Array> {
  const chunks: Uint8Array[] = [];
  let size = 0;
  for await (const chunk of stream) {
    size += chunk.byteLength;
    if (size > max) throw tooLarge(max);
    chunks.push(chunk);
  }
  return Buffer.concat(chunks, size);
}

const tooLarge = (max: number): Failure =>
  refused('body-too-large', `the request body is over ${max} bytes (server.body_max)`);

/**
 * Reads the body, counting what arrives: a missing, wrong or chunked length changes nothing. What
 * an announced length already rules out is refused before it is read. Only JSON is taken.
 */
export function limitBody(max: number): MiddlewareHandler<ApiEnv> {
  return async (c, next) => {
    c.set('body', null);
    if (!hasBody.has(c.req.method) || c.req.raw.body === null) return next();
    const announced = c.req.header('content-length');
    if (announced !== undefined && Number(announced) > max) throw tooLarge(max);
    const body = await readUpTo(c.req.raw.body, max);
    if (body.byteLength > 0) {
      const type = c.req.header('content-type') ?? '';
      if (!/^application\/json(;|$)/i.test(type)) {
        throw refused('unsupported-media-type', 'the body must be application/json');
      }
      c.set('body', body);
    }
    const { method, headers, signal, url } = c.req.raw;
    c.req.raw = new Request(url, { method, headers, signal, body });
    return next();
  };
}
