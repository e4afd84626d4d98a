import { createHash } from 'node:crypto';
import { mkdtempSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { createServer } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, expect, test } from 'vitest';
import { isLoopback, listen } from '../../src/api/server.ts';
import { configOf } from '../../src/config/load.ts';
import { startHarness } from './harness.ts';

const folder = mkdtempSync(join(tmpdir(), 'varve-auth-'));
afterAll(() => {
  rmSync(folder, { recursive: true });
});

const tokens = [
  { name: 'reader', scopes: ['read' as const], token: 'reader-token-0123' },
  {
    name: 'operator',
    scopes: ['admin' as const],
    token_sha256: createHash('sha256').update('operator-token-0123').digest('hex'),
  },
];
const bearer = (token: string) => ({ authorization: `Bearer ${token}` });

test('without a known token only health and the description answer', async () => {
  await using api = await startHarness({ auth: { tokens } });
  for (const path of ['/healthz', '/readyz', '/openapi.json', '/docs']) {
    expect((await api.call('GET', path)).status).toBe(200);
  }
  const attempts = [{}, bearer('wrong-token-000000'), { authorization: 'Basic cmVhZGVy' }];
  for (const headers of attempts) {
    for (const path of ['/v1/vms', '/metrics', '/v1/none']) {
      const answer = await api.call('GET', path, undefined, headers);
      expect([path, answer.json['code']]).toEqual([path, 'unauthorized']);
    }
  }
});

test('a scope allows what it names and what is below it', async () => {
  await using api = await startHarness({ auth: { tokens } });
  const reader = bearer('reader-token-0123');
  const operator = bearer('operator-token-0123');
  expect((await api.call('GET', '/v1/vms', undefined, reader)).status).toBe(200);
  expect((await api.call('GET', '/metrics', undefined, reader)).status).toBe(200);
  const refused = await api.call('POST', '/v1/gc/runs', {}, reader);
  expect(refused.json).toMatchObject({ code: 'forbidden', status: 403 });
  expect((await api.call('POST', '/v1/gc/runs', {}, operator)).json).toEqual({ forced: false });
  expect((await api.call('GET', '/v1/vms', undefined, operator)).status).toBe(200);
});

test('tokens appear in no log line and no answer', async () => {
  await using api = await startHarness({ auth: { tokens } });
  const answer = await api.call('POST', '/v1/vms', {}, bearer('reader-token-0123'));
  expect(answer.text).toContain('reader');
  expect(answer.text + api.logged.join('')).not.toContain('reader-token');
});

test('without tokens, a name that merely resolves here is refused', async () => {
  await using api = await startHarness();
  const answer = await api.call('GET', '/v1/vms', undefined, { host: 'attacker.example' });
  expect(answer.json['code']).toBe('host-refused');
  expect((await api.call('GET', '/v1/vms', undefined, { host: '[::1]:7070' })).status).toBe(200);
});

test('a port that others reach is not opened without tokens', async () => {
  for (const address of ['0.0.0.0:0', '[::]:0', '192.0.2.1:0', 'example.org:0']) {
    const { server } = configOf({ server: { listen: address, socket: 'off' } });
    const started = await listen({ server, hasTokens: false, fetch: () => new Response() });
    if (started.ok) throw new Error(`${address} was opened`);
    expect(started.error.kind).toBe('listen-refused');
    expect(started.error.message).toContain('[[auth.tokens]]');
  }
  expect(['127.0.0.1', '127.9.9.9', '::1', 'localhost'].every(isLoopback)).toBe(true);
});

test('the socket is for its owner and group; a dead one is replaced, a live one is not', async () => {
  const socket = join(folder, 'new', 'api.sock');
  const { server } = configOf({ server: { listen: 'off', socket } });
  const options = { server, hasTokens: false, fetch: () => new Response('ok') };
  const first = await listen(options);
  if (!first.ok) throw new Error(first.error.message);
  expect(statSync(socket).mode & 0o777).toBe(0o660);
  const second = await listen(options);
  expect(!second.ok && second.error.kind).toBe('socket-in-use');
  await first.value.close(0);
  leaveDeadSocket(socket);
  const third = await listen(options);
  if (!third.ok) throw new Error(third.error.message);
  await third.value.close(0);
});

/** What a killed daemon leaves: a socket file that nobody answers on. */
function leaveDeadSocket(path: string): void {
  const server = createServer();
  server.listen(path);
  (server as unknown as { _handle: { close(): void } })._handle.close();
}

test('a file that is no socket is not deleted', async () => {
  const socket = join(folder, 'precious');
  writeFileSync(socket, 'data');
  const { server } = configOf({ server: { listen: 'off', socket } });
  const started = await listen({ server, hasTokens: false, fetch: () => new Response() });
  expect(!started.ok && started.error.message).toContain('not a socket');
  expect(statSync(socket).size).toBe(4);
});

test('a port in use is reported with its key', async () => {
  const taken = createServer();
  await new Promise<void>((resolve) => taken.listen(0, '127.0.0.1', resolve));
  const address = taken.address();
  if (address === null || typeof address === 'string') throw new Error('no port');
  const { server } = configOf({
    server: { listen: `127.0.0.1:${address.port}`, socket: join(folder, 'half.sock') },
  });
  const started = await listen({ server, hasTokens: false, fetch: () => new Response() });
  expect(!started.ok && started.error.message).toContain('server.listen');
  expect(statSync(join(folder, 'half.sock'), { throwIfNoEntry: false })).toBeUndefined();
  taken.close();
});
