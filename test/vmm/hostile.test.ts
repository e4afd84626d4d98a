import { mkdtemp, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { VmmClient } from '../../src/vmm/client.ts';
import type { VmmError } from '../../src/vmm/errors.ts';
import { probeVmm } from '../../src/vmm/probe.ts';
import {
  answerPaths,
  httpAnswer,
  never,
  pausedVm,
  startRawServer,
  type Answerer,
} from './raw-server.ts';

const quick = { queryMs: 300, changeMs: 300, bulkMs: 300, snapshotMs: 300 };

async function probeError(answer: Answerer): Promise<VmmError> {
  await using server = await startRawServer(answer);
  const client = new VmmClient({ socketPath: server.socketPath, timeoutsMs: quick });
  const started = performance.now();
  const probed = await probeVmm(client, never);
  expect(performance.now() - started).toBeLessThan(1_500);
  expect(probed.ok).toBe(false);
  if (probed.ok) throw new Error('unreachable');
  expect(probed.error.message).toContain(server.socketPath);
  return probed.error;
}

test('a peer that sends garbage is not a VMM', async () => {
  const error = await probeError((socket) => void socket.write('\x00\xff\x01garbage\n\n\n\n'));
  expect(error.kind).toBe('vmm-not-a-vmm');
});

test('a peer that never answers times out', async () => {
  const error = await probeError(() => undefined);
  expect(error.kind).toBe('vmm-timeout');
});

test('a peer that stops in the middle of its headers times out', async () => {
  const error = await probeError((socket) => void socket.write('HTTP/1.1 200 OK\r\nContent-'));
  expect(error.kind).toBe('vmm-timeout');
});

test('a peer that stops in the middle of its body times out', async () => {
  const half = httpAnswer(200, pausedVm['/'][1]).slice(0, -10);
  const error = await probeError((socket) => void socket.write(half));
  expect(error.kind).toBe('vmm-timeout');
});

test('a peer that trickles bytes for ever times out', async () => {
  const error = await probeError((socket) => {
    socket.write('HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n');
    const timer = setInterval(() => socket.write('1\r\n \r\n'), 20);
    socket.on('close', () => clearInterval(timer));
  });
  expect(error.kind).toBe('vmm-timeout');
});

test('a peer that closes without an answer is unreachable', async () => {
  const error = await probeError((socket) => void socket.destroy());
  expect(error.kind).toBe('vmm-unreachable');
});

test('a peer that closes in the middle of its answer is unreachable', async () => {
  const half = httpAnswer(200, pausedVm['/'][1]).slice(0, -10);
  const error = await probeError((socket) => void socket.end(half));
  expect(error.kind).toBe('vmm-unreachable');
});

test('a body without end is cut off', async () => {
  const error = await probeError((socket) => {
    socket.write('HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n');
    const block = `10000\r\n${'x'.repeat(0x10000)}\r\n`;
    const push = (): void => {
      while (!socket.destroyed && socket.write(block));
    };
    socket.on('drain', push);
    push();
  });
  expect(error.kind).toBe('vmm-not-a-vmm');
});

test('headers without end are cut off', async () => {
  const error = await probeError((socket) => {
    socket.write(`HTTP/1.1 200 OK\r\n${`X-A: ${'y'.repeat(1000)}\r\n`.repeat(100)}`);
  });
  expect(error.kind).toBe('vmm-not-a-vmm');
});

test('a protocol upgrade is not a VMM', async () => {
  const error = await probeError((socket) => {
    socket.write('HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n');
  });
  expect(error.kind).toBe('vmm-not-a-vmm');
});

test.each([
  ['another API', '{"swagger":"2.0"}'],
  ['an array', '[]'],
  ['no JSON', '<html>'],
  ['an unclosed object', '{"id":'],
  ['deep nesting', '['.repeat(30_000)],
])('%s is not a VMM', async (_, body) => {
  const error = await probeError((socket) => void socket.write(httpAnswer(200, body)));
  expect(error.kind).toBe('vmm-not-a-vmm');
});

test('an HTTP server that has no GET / is not a VMM', async () => {
  const error = await probeError((socket) => void socket.write(httpAnswer(404, 'not here')));
  expect(error.kind).toBe('vmm-not-a-vmm');
});

test('an unknown state is a bad answer that names the field', async () => {
  const body = '{"id":"a","state":"Sleeping","vmm_version":"1","app_name":"Firecracker"}';
  const error = await probeError(answerPaths({ ...pausedVm, '/': [200, body] }));
  expect(error).toMatchObject({ kind: 'vmm-bad-answer', field: 'state' });
});

test.each(['-1', '1.5', '1e3', '"128"', 'null', '9007199254740993', '128.0', '0x80'])(
  'a memory size of %s is a bad answer',
  async (size) => {
    const body = `{"vcpu_count":1,"mem_size_mib":${size},"track_dirty_pages":true}`;
    const error = await probeError(answerPaths({ ...pausedVm, '/machine-config': [200, body] }));
    expect(error.kind).toBe('vmm-bad-answer');
    if (size !== '0x80') expect(error.field).toBe('mem_size_mib');
  },
);

test('an error of the server is reported with its words', async () => {
  const error = await probeError(
    answerPaths({ ...pausedVm, '/memory/dirty': [500, '{"fault_message":"out of luck"}'] }),
  );
  expect(error).toMatchObject({ kind: 'vmm-refused', status: 500, fault: 'out of luck' });
});

test('a file that is no socket, a missing path and too long a path are told apart', async () => {
  const directory = await mkdtemp(join(tmpdir(), 'varve-vmm-'));
  const file = join(directory, 'file');
  await writeFile(file, '');
  const kinds: string[] = [];
  for (const socketPath of [file, join(directory, 'missing'), join(directory, 'x'.repeat(200))]) {
    const state = await new VmmClient({ socketPath, timeoutsMs: quick }).state(never);
    kinds.push(state.ok ? 'ok' : state.error.kind);
    if (!state.ok) expect(state.error.message).toContain(socketPath);
  }
  await rm(directory, { recursive: true });
  expect(kinds).toEqual(['vmm-not-a-vmm', 'vmm-unreachable', 'vmm-unreachable']);
});

test('an aborted request rejects with the signal’s reason and closes its connection', async () => {
  let onClose: () => void = () => undefined;
  const gone = new Promise<void>((resolve) => (onClose = resolve));
  const abort = new AbortController();
  await using server = await startRawServer((socket) => {
    socket.on('close', onClose);
    abort.abort(new Error('cancelled by the test'));
  });
  const client = new VmmClient({ socketPath: server.socketPath });
  await expect(client.pause(abort.signal)).rejects.toThrow('cancelled by the test');
  await gone;
});

test('a signal that is aborted already sends nothing', async () => {
  await using server = await startRawServer(answerPaths(pausedVm));
  const client = new VmmClient({ socketPath: server.socketPath });
  await expect(client.pause(AbortSignal.abort(new Error('too late')))).rejects.toThrow('too late');
  expect(server.requests).toEqual([]);
});
