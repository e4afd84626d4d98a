/**
 * One HTTP request over a Unix socket, on a connection of its own. It always ends: by an answer, by
 * an error, by its time-out, or by its signal. What a hostile peer sends is bounded by
 * `answerBytesMax`.
 */
import { stat } from 'node:fs/promises';
import { request as httpRequest, type ClientRequest, type IncomingMessage } from 'node:http';
import { systemCode, err, ok, type Result } from '../result.ts';
import { vmmError, type VmmError } from './errors.ts';
import { stringifyExact } from './exact-json.ts';

export interface VmmRequest {
  readonly method: 'GET' | 'PUT' | 'PATCH';
  readonly path: string;
  /** Sent as JSON; bigints as plain integers. */
  readonly body?: unknown;
  /** From the connect to the last byte of the answer. */
  readonly timeoutMs: number;
  /** A longer answer is refused as soon as it is. */
  readonly answerBytesMax: number;
  /**
   * Only the status and the first bytes matter: past `answerBytesMax` the rest is dropped, not
   * refused.
   */
  readonly truncate?: boolean;
}

export interface VmmAnswer {
  readonly status: number;
  readonly body: Buffer;
  /** Set where `truncate` cut the body. */
  readonly truncated: boolean;
}

/** Rejects with the signal's reason when aborted; every other failure is a value. */
export async function sendRequest(
  socketPath: string,
  request: VmmRequest,
  signal: AbortSignal,
): Promise<Result<VmmAnswer, VmmError>> {
  signal.throwIfAborted();
  const payload = request.body === undefined ? null : Buffer.from(stringifyExact(request.body));
  const outcome = await exchange(socketPath, request, payload, signal);
  if (outcome.ok) return outcome;
  if (outcome.error.code !== 'ECONNREFUSED') return outcome;
  return err(await refineRefused(socketPath, outcome.error));
}

function exchange(
  socketPath: string,
  request: VmmRequest,
  payload: Buffer | null,
  signal: AbortSignal,
): Promise<Result<VmmAnswer, VmmError>> {
  return new Promise((resolve, reject) => {
    let settled = false;
    let sent: ClientRequest | undefined;
    const settle = (act: () => void): void => {
      if (settled) return;
      settled = true;
      clearTimeout(timer);
      signal.removeEventListener('abort', onAbort);
      sent?.destroy();
      act();
    };
    const finish = (result: Result<VmmAnswer, VmmError>): void => settle(() => resolve(result));
    const onAbort = (): void => settle(() => reject(signal.reason as Error));
    const where = `${request.method} ${request.path} at ${socketPath}`;
    const timer = setTimeout(() => {
      const message = `${where}: no answer within ${request.timeoutMs} ms`;
      finish(err(vmmError('vmm-timeout', message, { socketPath })));
    }, request.timeoutMs);
    signal.addEventListener('abort', onAbort, { once: true });
    try {
      sent = httpRequest({
        socketPath,
        method: request.method,
        path: request.path,
        agent: false,
        headers: headersFor(payload),
      });
    } catch (error) {
      finish(err(connectionError(where, socketPath, error)));
      return;
    }
    // After settling, errors still come (the destroyed socket's): they have nobody to tell.
    sent.on('error', (error) => finish(err(connectionError(where, socketPath, error))));
    sent.on('response', (message) => collect(message, request, where, socketPath, finish));
    sent.on('upgrade', () => {
      const text = `${where}: answered with a protocol upgrade`;
      finish(err(vmmError('vmm-not-a-vmm', text, { socketPath })));
    });
    sent.end(payload ?? undefined);
  });
}

function headersFor(payload: Buffer | null): Record<string, string | number> {
  const headers: Record<string, string | number> = {
    accept: 'application/json',
    host: 'localhost',
  };
  if (payload !== null) {
    headers['content-type'] = 'application/json';
    headers['content-length'] = payload.length;
  }
  return headers;
}

function collect(
  message: IncomingMessage,
  request: VmmRequest,
  where: string,
  socketPath: string,
  finish: (result: Result<VmmAnswer, VmmError>) => void,
): void {
  const status = message.statusCode ?? 0;
  const chunks: Buffer[] = [];
  let length = 0;
  message.on('data', (chunk: Buffer) => {
    length += chunk.length;
    if (length <= request.answerBytesMax) {
      chunks.push(chunk);
      return;
    }
    if (request.truncate === true) {
      finish(ok({ status, body: Buffer.concat(chunks), truncated: true }));
      return;
    }
    const text = `${where}: the answer is longer than ${request.answerBytesMax} bytes`;
    finish(err(vmmError('vmm-bad-answer', text, { socketPath, field: '' })));
  });
  message.on('end', () => {
    if (message.complete) finish(ok({ status, body: Buffer.concat(chunks), truncated: false }));
  });
  message.on('error', (error) => finish(err(connectionError(where, socketPath, error))));
  message.on('close', () => {
    const text = `${where}: the connection closed in the middle of the answer`;
    finish(err(vmmError('vmm-unreachable', text, { socketPath })));
  });
}

function connectionError(where: string, socketPath: string, error: unknown): VmmError {
  const code = systemCode(error) ?? '';
  const more = { socketPath, code };
  if (code.startsWith('HPE_')) {
    return vmmError('vmm-not-a-vmm', `${where}: the answer is not HTTP (${code})`, more);
  }
  switch (code) {
    case 'EACCES':
    case 'EPERM':
      return vmmError('permission-denied', `${where}: no permission to connect (${code})`, more);
    case 'ENOENT':
      return vmmError('vmm-unreachable', `${where}: there is no such socket`, more);
    case 'ECONNREFUSED':
      return vmmError('vmm-unreachable', `${where}: nothing listens on the socket`, more);
    case 'EAGAIN':
      return vmmError('vmm-unreachable', `${where}: the socket accepts no more connections`, more);
    case 'ECONNRESET':
    case 'EPIPE':
      return vmmError('vmm-unreachable', `${where}: the connection closed without an answer`, more);
    case 'EPROTOTYPE':
    case 'ENOTSOCK':
      return vmmError('vmm-not-a-vmm', `${where}: it is not a stream socket (${code})`, more);
    default: {
      const text = error instanceof Error ? error.message : String(error);
      return vmmError('vmm-unreachable', `${where}: ${text}`, more);
    }
  }
}

/** Connecting to a file that is no socket is refused too: say what it is. */
async function refineRefused(socketPath: string, error: VmmError): Promise<VmmError> {
  try {
    const found = await stat(socketPath);
    if (found.isSocket()) return error;
    return vmmError('vmm-not-a-vmm', `${socketPath} is not a socket`, { socketPath });
  } catch {
    return error;
  }
}
