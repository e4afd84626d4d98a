/**
 * `Idempotency-Key` on every POST: the same key with the same request gets the first answer again.
 * Answers are kept in memory. Across a restart the operations themselves are idempotent: a
 * capture's key is stored with its job, attaching and the catalog's writes return what is already
 * there.
 */
import { createHash } from 'node:crypto';
import type { MiddlewareHandler } from 'hono';
import type { Clock } from '../clock.ts';
import { refused } from './problem.ts';
import type { ApiEnv } from './router.ts';

interface Kept {
  /** Hash of the request; another one under the same key is refused. */
  readonly fingerprint: string;
  readonly keptUntilMs: number;
  /** Null while the first request is still being answered. */
  answer: { readonly status: number; readonly headers: Headers; readonly body: ArrayBuffer } | null;
}

const KEPT_MAX = 4096;
const KEPT_BYTES_MAX = 256 * 1024;
const KEPT_MS = 24 * 3_600_000;
const keyPattern = /^[\x21-\x7e]{1,255}$/;

function fingerprint(method: string, path: string, body: Uint8Array | null): string {
  const hash = createHash('sha256').update(`${method} ${path}\n`);
  return (body === null ? hash : hash.update(body)).digest('hex');
}

/** Forgets the oldest entries past the bound, and those past their time. */
function prune(kept: Map<string, Kept>, nowMs: number): void {
  for (const [key, entry] of kept) {
    const isOld = entry.keptUntilMs <= nowMs || kept.size > KEPT_MAX;
    if (!isOld) return;
    kept.delete(key);
  }
}

function replay(entry: NonNullable<Kept['answer']>): Response {
  const headers = new Headers(entry.headers);
  headers.set('Idempotency-Replayed', 'true');
  return new Response(entry.body, { status: entry.status, headers });
}

/** Server failures are not kept, so that the client's retry can succeed. */
const isFinal = (status: number): boolean => status < 500 && status !== 429;

export function idempotency(clock: Pick<Clock, 'nowMs'>): MiddlewareHandler<ApiEnv> {
  const kept = new Map<string, Kept>();
  return async (c, next) => {
    const given = c.req.header('idempotency-key');
    if (c.req.method !== 'POST' || given === undefined) return next();
    if (!keyPattern.test(given)) {
      throw refused('request-invalid', 'Idempotency-Key must be 1 to 255 visible ASCII characters');
    }
    prune(kept, clock.nowMs());
    const key = `${c.get('principal').name}\n${given}`;
    const print = fingerprint(c.req.method, c.req.path, c.get('body'));
    const earlier = kept.get(key);
    if (earlier !== undefined) {
      if (earlier.fingerprint !== print) {
        throw refused('idempotency-key-reused', 'this Idempotency-Key belongs to another request');
      }
      if (earlier.answer !== null) return replay(earlier.answer);
      throw refused('idempotency-key-busy', 'the first request with this key is still running');
    }
    const entry: Kept = {
      fingerprint: print,
      keptUntilMs: clock.nowMs() + KEPT_MS,
      answer: null,
    };
    kept.set(key, entry);
    try {
      await next();
    } finally {
      await keep(kept, key, entry, c.res);
    }
  };
}

async function keep(
  kept: Map<string, Kept>,
  key: string,
  entry: Kept,
  response: Response,
): Promise<void> {
  if (!isFinal(response.status)) {
    kept.delete(key);
    return;
  }
  const body = await response.clone().arrayBuffer();
  if (body.byteLength > KEPT_BYTES_MAX) kept.delete(key);
  else entry.answer = { status: response.status, headers: new Headers(response.headers), body };
}
