import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { startHarness, type Harness } from './harness.ts';

async function attached(api: Harness): Promise<void> {
  const socket = join(api.vmRoot, 'fc.sock');
  writeFileSync(socket, '');
  await api.call('POST', '/v1/vms', { socketPath: socket, vmId: 'web' });
}

const key = (value: string) => ({ 'idempotency-key': value });

test('the same key and request get the first answer again, and start one capture', async () => {
  await using api = await startHarness();
  await attached(api);
  const first = await api.call('POST', '/v1/vms/web/captures', {}, key('k1'));
  const again = await api.call('POST', '/v1/vms/web/captures', {}, key('k1'));
  expect(again.status).toBe(202);
  expect(again.json).toEqual(first.json);
  expect(again.headers.location).toBe(first.headers.location);
  expect(again.headers['idempotency-replayed']).toBe('true');
  expect(api.captures.requests).toHaveLength(1);
  expect(api.captures.requests[0]?.idempotencyKey).toBe('k1');
});

test('the same key with another request is refused', async () => {
  await using api = await startHarness();
  await attached(api);
  await api.call('POST', '/v1/vms/web/captures', {}, key('k1'));
  const other = await api.call('POST', '/v1/vms/web/captures', { alias: 'x' }, key('k1'));
  expect(other.json).toMatchObject({ code: 'idempotency-key-reused', status: 422 });
});

test('while the first request runs, the second is told so', async () => {
  await using api = await startHarness();
  await attached(api);
  const opened = deferred();
  api.captures.gate = opened.promise;
  const first = api.call('POST', '/v1/vms/web/captures', {}, key('k1'));
  await expect.poll(() => api.captures.requests.length).toBe(1);
  const second = await api.call('POST', '/v1/vms/web/captures', {}, key('k1'));
  expect(second.json['code']).toBe('idempotency-key-busy');
  opened.resolve(undefined);
  expect((await first).status).toBe(202);
});

function deferred() {
  let resolve: (value: undefined) => void = () => undefined;
  const promise = new Promise<undefined>((done) => (resolve = done));
  return { promise, resolve };
}

test('a server failure is not kept: the retry can succeed', async () => {
  await using api = await startHarness();
  const socket = join(api.vmRoot, 'fc.sock');
  writeFileSync(socket, '');
  api.captures.attachFailure = { kind: 'vmm-timeout', message: 'no answer' };
  const request = { socketPath: socket };
  expect((await api.call('POST', '/v1/vms', request, key('k2'))).status).toBe(504);
  api.captures.attachFailure = null;
  expect((await api.call('POST', '/v1/vms', request, key('k2'))).status).toBe(201);
});

test('a key that is not one is refused', async () => {
  await using api = await startHarness();
  const answer = await api.call('POST', '/v1/vms', {}, key('x'.repeat(256)));
  expect(answer.json['code']).toBe('request-invalid');
});
