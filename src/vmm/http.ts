/**
 * One HTTP request over a Unix socket, on a connection of its own or on a kept one. It always ends:
 * by an answer, by an error, by its time-out, or by its signal. What a hostile peer sends is bounded
 * by `answerBytesMax`.
 */
import { stat } from 'node:fs/promises';
import { Agent, request as httpRequest, type ClientRequest, type IncomingMessage } from 'node:http';
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

type Outcome = Result<VmmAnswer, VmmError>;

/**
 * Connections to one socket that stay open between requests. A kept one may turn out closed by its
 * peer: GET and PATCH, which may be said twice, then get a new one. Whether a PUT took effect would
 * be unknown, so it takes a kept one only right after an answer came.
 */
export class KeptConnections implements Disposable {
  readonly #agent: Agent;
  #answeredMs = -Infinity;

  /** @param idleMax how many stay open */
  constructor(idleMax: number) {
    this.#agent = new Agent({ keepAlive: true, maxFreeSockets: idleMax });
  }

  /** The one used last is used next. */
  agentFor(method: VmmRequest['method']): Agent | undefined {
    const fresh = performance.now() - this.#answeredMs < FRESH_MS;
    return method === 'PUT' && !fresh ? undefined : this.#agent;
  }

  answered(): void {
    this.#answeredMs = performance.now();
  }

  /** Requests that are on their way, a resume perhaps, are not disturbed. */
  [Symbol.dispose](): void {
    this.#agent.maxFreeSockets = 0;
    for (const idle of Object.values(this.#agent.freeSockets)) {
      for (const socket of idle ?? []) socket.destroy();
    }
  }
}

/** Servers keep an idle connection for longer than this. */
const FRESH_MS = 250;

/** Rejects with the signal's reason when aborted; every other failure is a value. */
export async function sendRequest(
  socketPath: string,
  request: VmmRequest,
  signal: AbortSignal,
  kept?: KeptConnections,
): Promise<Outcome> {
  signal.throwIfAborted();
  const payload = request.body === undefined ? null : Buffer.from(stringifyExact(request.body));
  const agent = kept?.agentFor(request.method);
  const first = await exchange(socketPath, request, payload, signal, agent);
  if (agent !== undefined && first.outcome.ok) kept?.answered();
  const { outcome } =
    first.stale && request.method !== 'PUT'
      ? await exchange(socketPath, request, payload, signal, undefined)
      : first;
  if (outcome.ok) return outcome;
  if (outcome.error.code !== 'ECONNREFUSED') return outcome;
  return err(await refineRefused(socketPath, outcome.error));
}

function exchange(
  socketPath: string,
  request: VmmRequest,
  payload: Buffer | null,
  signal: AbortSignal,
  agent: Agent | undefined,
): Promise<{ readonly outcome: Outcome; readonly stale: boolean }> {
  return new Promise((resolve, reject) => {
    let settled = false;
    let answered = false;
    let sent: ClientRequest | undefined;
    const settle = (act: () => void, keep: boolean): void => {
      if (settled) return;
      settled = true;
      clearTimeout(timer);
      signal.removeEventListener('abort', onAbort);
      if (!keep) sent?.destroy();
      act();
    };
    const finish = (outcome: Outcome): void => {
      const stale =
        !outcome.ok && !answered && sent?.reusedSocket === true && isClosed(outcome.error);
      const keep = agent !== undefined && outcome.ok && !outcome.value.truncated;
      settle(() => resolve({ outcome, stale }), keep);
    };
    const onAbort = (): void => settle(() => reject(signal.reason as Error), false);
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
        agent: agent ?? false,
        headers: headersFor(payload),
      });
    } catch (error) {
      finish(err(connectionError(where, socketPath, error)));
      return;
    }
    // After settling, errors still come (the destroyed socket's): they have nobody to tell.
    sent.on('error', (error) => finish(err(connectionError(where, socketPath, error))));
    sent.on('response', (message) => {
      answered = true;
      collect(message, request, where, socketPath, finish);
    });
    sent.on('upgrade', () => {
      const text = `${where}: answered with a protocol upgrade`;
      finish(err(vmmError('vmm-not-a-vmm', text, { socketPath })));
    });
    sent.end(payload ?? undefined);
  });
}

const isClosed = (error: VmmError): boolean =>
  error.code === 'ECONNRESET' || error.code === 'EPIPE';

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
  finish: (outcome: Outcome) => void,
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
