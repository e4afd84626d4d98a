/** A Unix-socket server that answers each connection with whatever the test says, byte for byte. */
import { mkdtemp, rm } from 'node:fs/promises';
import { createServer, type Server, type Socket } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';

export interface RawServer extends AsyncDisposable {
  readonly socketPath: string;
  /** First lines of the requests, in order. */
  readonly requests: string[];
  /** Bodies of the requests, in order. */
  readonly bodies: string[];
}

export type Answerer = (socket: Socket, requestLine: string, body: string) => void;

export async function startRawServer(answer: Answerer): Promise<RawServer> {
  const directory = await mkdtemp(join(tmpdir(), 'varve-vmm-'));
  const socketPath = join(directory, 'api.sock');
  const requests: string[] = [];
  const bodies: string[] = [];
  const open = new Set<Socket>();
  const server: Server = createServer((socket) => {
    open.add(socket);
    socket.on('close', () => open.delete(socket));
    socket.on('error', () => undefined);
    let text = '';
    socket.on('data', (chunk) => {
      text += chunk.toString('latin1');
      const end = text.indexOf('\r\n\r\n');
      if (end < 0) return;
      const length = Number(/content-length: (\d+)/i.exec(text)?.[1] ?? 0);
      if (text.length < end + 4 + length) return;
      const line = text.slice(0, text.indexOf('\r\n'));
      const body = text.slice(end + 4);
      text = '';
      requests.push(line.replace(/ HTTP\/1\.1$/, ''));
      bodies.push(body);
      answer(socket, line, body);
    });
  });
  await new Promise<void>((resolve) => server.listen(socketPath, resolve));
  return {
    socketPath,
    requests,
    bodies,
    [Symbol.asyncDispose]: async () => {
      for (const socket of open) socket.destroy();
      await new Promise((resolve) => server.close(resolve));
      await rm(directory, { recursive: true, force: true });
    },
  };
}

export function httpAnswer(status: number, body: string): string {
  const length = Buffer.byteLength(body);
  const head = `HTTP/1.1 ${status} X\r\nContent-Type: application/json\r\n`;
  return `${head}Content-Length: ${length}\r\n\r\n${body}`;
}

/** Answers by path; an unknown path is refused as Firecracker does. */
export function answerPaths(paths: Readonly<Record<string, [number, string]>>): Answerer {
  return (socket, line) => {
    const [method = '', path = ''] = line.split(' ');
    const known = paths[`${method} ${path}`] ?? paths[path];
    const fault = `{"fault_message":"Invalid request method and/or path: ${method} ${path}."}`;
    socket.write(known === undefined ? httpAnswer(400, fault) : httpAnswer(...known));
  };
}

export const pausedVm = {
  '/': [200, '{"id":"vm1","state":"Paused","vmm_version":"1.13.0","app_name":"Firecracker"}'],
  '/version': [200, '{"firecracker_version":"1.13.0"}'],
  '/machine-config': [
    200,
    '{"vcpu_count":1,"mem_size_mib":128,"smt":false,"track_dirty_pages":true}',
  ],
} satisfies Record<string, [number, string]>;

export const never = new AbortController().signal;
