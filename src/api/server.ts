/** Listens on the Unix socket and the TCP address; refuses what would let strangers in. */
import { chmodSync, mkdirSync, statSync, unlinkSync } from 'node:fs';
import { createServer, type Server } from 'node:http';
import { connect, isIP } from 'node:net';
import { dirname } from 'node:path';
import { getRequestListener } from '@hono/node-server';
import type { Config } from '../config/load.ts';
import { err, ok, systemCode, type FailureDetail, type Result } from '../result.ts';

export interface ListenError extends FailureDetail {
  readonly kind: 'listen-refused' | 'listen-failed' | 'socket-in-use';
}

export interface ListenOptions {
  readonly server: Pick<Config['server'], 'listen' | 'socket' | 'requestTimeout'>;
  /** Whether any token is configured: without one, only local callers may reach the daemon. */
  readonly hasTokens: boolean;
  readonly fetch: (request: Request, env: object) => Promise<Response> | Response;
}

export interface Listening {
  /** `http://host:port` and `unix:/path`, as they came out. */
  readonly addresses: readonly string[];
  /** Stops accepting, ends idle connections, and the others after `graceMs`. */
  close(graceMs: number): Promise<void>;
}

const failure = (kind: ListenError['kind'], message: string): Result<never, ListenError> =>
  err({ kind, message });

/** Host and port of a `server.listen` value; brackets of an IPv6 address are taken off. */
export function parseAddress(listen: string): { host: string; port: number } {
  const at = listen.lastIndexOf(':');
  return { host: listen.slice(0, at).replace(/^\[|\]$/g, ''), port: Number(listen.slice(at + 1)) };
}

/** Whether only processes of this machine can reach the host. */
export function isLoopback(host: string): boolean {
  if (host === 'localhost' || host === '::1') return true;
  return isIP(host) === 4 && host.startsWith('127.');
}

function makeServer(options: ListenOptions): Server {
  const listener = getRequestListener(options.fetch, { overrideGlobalObjects: false });
  return createServer(
    {
      requestTimeout: options.server.requestTimeout,
      headersTimeout: Math.min(options.server.requestTimeout, 10_000),
      maxHeaderSize: 16 * 1024,
    },
    (request, response) => void listener(request, response),
  );
}

function listening(server: Server, where: { path: string } | { host: string; port: number }) {
  return new Promise<void>((resolve, reject) => {
    server.once('error', reject);
    server.listen(where, () => {
      server.off('error', reject);
      resolve();
    });
  });
}

/** Whether somebody accepts connections on a socket file. */
function isAnswered(path: string): Promise<boolean> {
  return new Promise((resolve) => {
    const probe = connect({ path });
    const answer = (value: boolean): void => {
      probe.destroy();
      resolve(value);
    };
    probe.once('connect', () => answer(true));
    probe.once('error', () => answer(false));
  });
}

/** Makes the folder, and removes the socket file that a dead daemon left. */
async function clearSocket(path: string): Promise<Result<null, ListenError>> {
  mkdirSync(dirname(path), { recursive: true, mode: 0o755 });
  const facts = statSync(path, { throwIfNoEntry: false });
  if (facts === undefined) return ok(null);
  if (!facts.isSocket()) {
    return failure('listen-failed', `server.socket: ${path} exists and is not a socket`);
  }
  if (await isAnswered(path)) {
    return failure('socket-in-use', `server.socket: another process answers on ${path}`);
  }
  unlinkSync(path);
  return ok(null);
}

async function listenUnix(server: Server, path: string): Promise<Result<string, ListenError>> {
  try {
    const cleared = await clearSocket(path);
    if (!cleared.ok) return cleared;
    // Between bind and chmod the file has the mode that the umask leaves: nobody else's, here.
    const umask = process.umask(0o117);
    try {
      await listening(server, { path });
    } finally {
      process.umask(umask);
    }
    chmodSync(path, 0o660);
    return ok(`unix:${path}`);
  } catch (error) {
    const why = systemCode(error) ?? String(error);
    return failure('listen-failed', `server.socket: cannot listen on ${path}: ${why}`);
  }
}

async function listenTcp(server: Server, listen: string): Promise<Result<string, ListenError>> {
  const { host, port } = parseAddress(listen);
  try {
    await listening(server, { host, port });
  } catch (error) {
    const why = systemCode(error) ?? String(error);
    return failure('listen-failed', `server.listen: cannot listen on ${listen}: ${why}`);
  }
  const address = server.address();
  const actual = typeof address === 'object' && address !== null ? address.port : port;
  return ok(`http://${host.includes(':') ? `[${host}]` : host}:${actual}`);
}

function closeServer(server: Server, graceMs: number): Promise<void> {
  return new Promise((resolve) => {
    const force = setTimeout(() => server.closeAllConnections(), graceMs);
    server.close(() => {
      clearTimeout(force);
      resolve();
    });
    server.closeIdleConnections();
  });
}

/** Starts listening on everything configured, or on nothing. */
export async function listen(options: ListenOptions): Promise<Result<Listening, ListenError>> {
  const { listen: tcp, socket } = options.server;
  if (tcp === 'off' && socket === 'off') {
    return failure('listen-refused', 'server.listen and server.socket are both off');
  }
  if (tcp !== 'off' && !options.hasTokens && !isLoopback(parseAddress(tcp).host)) {
    return failure(
      'listen-refused',
      `server.listen: ${tcp} is not a loopback address; set [[auth.tokens]] first`,
    );
  }
  const servers: Server[] = [];
  const addresses: string[] = [];
  const close = async (graceMs: number): Promise<void> => {
    await Promise.all(servers.map((server) => closeServer(server, graceMs)));
  };
  const starts = [
    ...(socket === 'off' ? [] : [(server: Server) => listenUnix(server, socket)]),
    ...(tcp === 'off' ? [] : [(server: Server) => listenTcp(server, tcp)]),
  ];
  for (const start of starts) {
    const server = makeServer(options);
    const started = await start(server);
    if (!started.ok) {
      await close(0);
      return started;
    }
    servers.push(server);
    addresses.push(started.value);
  }
  return ok({ addresses, close });
}
