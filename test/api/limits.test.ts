import { connect } from 'node:net';
import { expect, test } from 'vitest';
import { startHarness } from './harness.ts';

interface RawAnswer {
  readonly status: number;
  readonly text: string;
  readonly elapsedMs: number;
}

/**
 * Sends raw bytes and goes on sending `chunk` until the server answers or hangs up. Resolves with what
 * was answered by the time the connection closed.
 */
function raw(socketPath: string, head: string, chunk?: Buffer): Promise<RawAnswer> {
  return new Promise((resolve) => {
    const startedMs = performance.now();
    const socket = connect({ path: socketPath });
    let text = '';
    let elapsedMs = Infinity;
    const pump = (): void => {
      while (chunk !== undefined && text === '' && socket.writable && socket.write(chunk));
    };
    socket.on('connect', () => {
      socket.write(head);
      pump();
    });
    socket.on('drain', pump);
    socket.on('error', () => undefined);
    socket.on('data', (data) => {
      if (text === '') elapsedMs = performance.now() - startedMs;
      text += data.toString();
    });
    socket.on('close', () => {
      const status = Number(/^HTTP\/1\.1 (\d{3})/.exec(text)?.[1] ?? 0);
      resolve({ status, text, elapsedMs });
    });
  });
}

const head = (lines: readonly string[]) =>
  `${['POST /v1/vms HTTP/1.1', 'Host: localhost', 'Connection: close', ...lines].join('\r\n')}\r\n\r\n`;

const MIB = 1024 * 1024;
/** One chunk of chunked encoding. */
const mibChunk = Buffer.concat([
  Buffer.from(`${MIB.toString(16)}\r\n`),
  Buffer.alloc(MIB, 0x20),
  Buffer.from('\r\n'),
]);

test('a chunked body without end is refused as soon as it is over the limit', async () => {
  await using api = await startHarness();
  const rssBefore = process.memoryUsage.rss();
  const answer = await raw(
    api.socketPath,
    head(['Content-Type: application/json', 'Transfer-Encoding: chunked']),
    mibChunk,
  );
  expect(answer.status).toBe(413);
  expect(answer.text).toContain('"code":"body-too-large"');
  expect(answer.elapsedMs).toBeLessThan(1_000);
  expect(process.memoryUsage.rss() - rssBefore).toBeLessThan(200 * MIB);
});

test('an announced length over the limit is refused while the client still sends', async () => {
  await using api = await startHarness();
  const answer = await raw(
    api.socketPath,
    head(['Content-Type: application/json', `Content-Length: ${1024 * MIB}`]),
    Buffer.alloc(MIB, 0x20),
  );
  expect(answer.status).toBe(413);
  expect(answer.elapsedMs).toBeLessThan(1_000);
});

test.each(['abc', '-1', '1e3', '18446744073709551617', '5, 5'])(
  'the content length %s does not get around the limit',
  async (length) => {
    await using api = await startHarness();
    const answer = await raw(
      api.socketPath,
      head(['Content-Type: application/json', `Content-Length: ${length}`]),
      Buffer.alloc(MIB, 0x20),
    );
    expect([400, 413]).toContain(answer.status);
  },
);

test('a missing token is answered at once, while the body still comes', async () => {
  await using api = await startHarness({
    auth: { tokens: [{ name: 'ci', scopes: ['read'], token: '0123456789abcdef' }] },
  });
  const answer = await raw(
    api.socketPath,
    head(['Content-Type: application/json', 'Transfer-Encoding: chunked']),
    mibChunk,
  );
  expect(answer.status).toBe(401);
  expect(answer.elapsedMs).toBeLessThan(1_000);
  expect(answer.text).toMatch(/www-authenticate: Bearer/i);
});

test('after all of that, the daemon still answers', async () => {
  await using api = await startHarness();
  for (let i = 0; i < 5; i++) {
    const lines = ['Content-Type: application/json', 'Transfer-Encoding: chunked'];
    await raw(api.socketPath, head(lines), mibChunk);
  }
  expect((await api.call('GET', '/healthz')).status).toBe(200);
});
