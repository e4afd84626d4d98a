import { mkdirSync, symlinkSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { captureOf, startHarness } from './harness.ts';

test('health, readiness, metrics and the description answer', async () => {
  await using api = await startHarness();
  expect((await api.call('GET', '/healthz')).json).toEqual({ status: 'ok', version: '0.1.0' });
  expect((await api.call('GET', '/readyz')).json['status']).toBe('ready');
  const metrics = await api.call('GET', '/metrics');
  expect(metrics.headers['content-type']).toContain('text/plain; version=0.0.4');
  const described = await api.call('GET', '/openapi.json');
  expect(Object.keys(described.json['paths'] as object)).toEqual(
    expect.arrayContaining(['/v1/vms', '/v1/captures/{captureId}/events', '/v1/gc/plan']),
  );
});

test('the reference pages load nothing from elsewhere', async () => {
  await using api = await startHarness();
  for (const path of ['/docs', '/docs/problems']) {
    const page = await api.call('GET', path);
    expect(page.headers['content-type']).toContain('text/html');
    expect(page.headers['content-security-policy']).toContain("default-src 'none'");
    expect(page.text).not.toMatch(/(src|href)="(https?:)?\/\//);
    expect(page.text).not.toContain('<script');
  }
});

test('a VM is attached, shown, captured and detached', async () => {
  await using api = await startHarness();
  const socket = join(api.vmRoot, 'fc.sock');
  writeFileSync(socket, '');
  const attached = await api.call('POST', '/v1/vms', { socketPath: socket, vmId: 'web' });
  expect(attached.status).toBe(201);
  expect(attached.headers.location).toBe('/v1/vms/web');
  expect((await api.call('GET', '/v1/vms')).json['vms']).toHaveLength(1);
  const request = { resumeAfter: 'copy', precopyRounds: 16 };
  const started = await api.call('POST', '/v1/vms/web/captures', request);
  expect(started.status).toBe(202);
  expect(started.headers.location).toBe('/v1/captures/c-1');
  expect(api.captures.requests[0]).toMatchObject(request);
  expect((await api.call('GET', '/v1/captures/c-1')).json['status']).toBe('running');
  expect((await api.call('POST', '/v1/captures/c-1/cancel')).json['status']).toBe('aborted');
  expect((await api.call('DELETE', '/v1/vms/web')).status).toBe(204);
  expect((await api.call('GET', '/v1/vms/web')).status).toBe(404);
});

test('a second capture of a VM is a 409 problem with the id of the running one', async () => {
  await using api = await startHarness();
  const socket = join(api.vmRoot, 'fc.sock');
  writeFileSync(socket, '');
  await api.call('POST', '/v1/vms', { socketPath: socket, vmId: 'web' });
  await api.call('POST', '/v1/vms/web/captures', {});
  const second = await api.call('POST', '/v1/vms/web/captures', {});
  expect(second.status).toBe(409);
  expect(second.headers['content-type']).toBe('application/problem+json');
  expect(second.json).toMatchObject({
    code: 'capture-running',
    status: 409,
    title: 'Capture running',
    captureId: 'c-1',
    type: '/docs/problems#capture-running',
  });
  expect(second.json['requestId']).toBe(second.headers['x-request-id']);
});

test('invalid input is named field by field', async () => {
  await using api = await startHarness();
  const answer = await api.call('POST', '/v1/vms', { socketPath: 7, colour: 'red' });
  expect(answer.status).toBe(422);
  expect(answer.json['code']).toBe('request-invalid');
  const errors = answer.json['errors'] as { pointer: string }[];
  expect(errors.map((e) => e.pointer)).toContain('/json/socketPath');
  expect(errors).toHaveLength(2);
});

test.each([
  ['no body', undefined, {}, 422],
  ['not JSON', 'socketPath=/x', { 'content-type': 'application/x-www-form-urlencoded' }, 415],
  ['broken JSON', '{"socketPath":', {}, 400],
  ['no content type', '{}', { 'content-type': '' }, 415],
])('a body with %s is refused', async (_, body, headers, status) => {
  await using api = await startHarness();
  const answer = await api.call('POST', '/v1/vms', body, headers);
  expect([answer.status, answer.headers['content-type']]).toEqual([
    status,
    'application/problem+json',
  ]);
});

test('an unknown route and an unknown failure kind are problem documents too', async () => {
  await using api = await startHarness();
  expect((await api.call('GET', '/v2/vms')).json['code']).toBe('route-missing');
  const socket = join(api.vmRoot, 'fc.sock');
  writeFileSync(socket, '');
  api.captures.attachFailure = { kind: 'moon-phase', message: 'not now' };
  const answer = await api.call('POST', '/v1/vms', { socketPath: socket });
  expect(answer.json).toMatchObject({ code: 'moon-phase', status: 500, detail: 'not now' });
});

test('a bug answers 500 without its text, and logs it', async () => {
  await using api = await startHarness();
  api.captures.listVms = () => {
    throw new Error('secret inner text');
  };
  const answer = await api.call('GET', '/v1/vms');
  expect(answer.json['code']).toBe('internal');
  expect(answer.text).not.toContain('secret inner text');
  expect(api.logged.join('')).toContain('secret inner text');
});

test('sockets outside the roots are refused, whatever the path looks like', async () => {
  await using api = await startHarness();
  const outside = join(api.folder, 'outside');
  mkdirSync(outside);
  writeFileSync(join(outside, 'fc.sock'), '');
  symlinkSync(outside, join(api.vmRoot, 'link'));
  symlinkSync(join(outside, 'fc.sock'), join(api.vmRoot, 'fc.sock'));
  const refusedPaths = [
    join(outside, 'fc.sock'),
    join(api.vmRoot, 'link', 'fc.sock'),
    join(api.vmRoot, 'fc.sock'),
    `${api.vmRoot}/../outside/fc.sock`,
    `${api.vmRoot}-sibling/fc.sock`,
    '/proc/self/environ',
  ];
  for (const socketPath of refusedPaths) {
    const answer = await api.call('POST', '/v1/vms', { socketPath });
    expect([socketPath, answer.json['code']]).toEqual([socketPath, 'path-outside-roots']);
    expect(answer.status).toBe(403);
  }
  const invalid = await api.call('POST', '/v1/vms', { socketPath: 'fc.sock' });
  expect(invalid.json['code']).toBe('path-invalid');
  const missing = await api.call('POST', '/v1/vms', { socketPath: join(api.vmRoot, 'no.sock') });
  expect(missing.json['code']).toBe('path-missing');
  expect(api.captures.vms.size).toBe(0);
});

test('events give the state now, each change, and the end', async () => {
  await using api = await startHarness();
  const running = captureOf('c-9', 'web');
  api.captures.captures.set('c-9', running);
  api.captures.events.push({ type: 'stage', stage: 'read', state: 'ended' });
  const answer = await api.call('GET', '/v1/captures/c-9/events');
  expect(answer.headers['content-type']).toContain('text/event-stream');
  const events = [...answer.text.matchAll(/^event: (\w+)$/gm)].map((match) => match[1]);
  expect(events).toEqual(['status', 'stage', 'status']);
  expect(api.captures.watchersEnded).toBe(1);
});
