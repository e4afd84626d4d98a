/** What is refused before anything is done: pages of other servers, wrong methods, bad names. */
import { expect, test } from 'vitest';
import { startHarness, vmOf } from './harness.ts';

const foreign = [
  { origin: 'https://evil.example' },
  { origin: 'null' },
  { origin: 'http://127.0.0.1:1' },
  { 'sec-fetch-site': 'cross-site' },
  { 'sec-fetch-site': 'same-site' },
] as const;

test('without tokens, a page of another server changes nothing, even without a body', async () => {
  await using api = await startHarness();
  api.captures.vms.set('web', vmOf('web', '/run/web.sock'));
  for (const headers of foreign) {
    for (const [method, path] of [
      ['POST', '/v1/vms/web/captures'],
      ['DELETE', '/v1/vms/web'],
      ['POST', '/v1/gc/runs'],
    ] as const) {
      const answer = await api.call(method, path, undefined, headers);
      expect([answer.status, answer.json['code']]).toEqual([403, 'origin-refused']);
    }
    expect((await api.call('GET', '/v1/vms', undefined, headers)).status).toBe(200);
  }
  expect(api.captures.requests).toEqual([]);
  const own = { 'sec-fetch-site': 'same-origin' };
  expect((await api.call('POST', '/v1/vms/web/captures', {}, own)).status).toBe(202);
});

test('a method that a path does not have is answered with those it has', async () => {
  await using api = await startHarness();
  for (const [method, path, allow] of [
    ['PUT', '/v1/vms', 'GET, HEAD, POST'],
    ['POST', '/healthz', 'GET, HEAD'],
    ['PATCH', '/v1/snapshots/any', 'DELETE, GET, HEAD'],
  ] as const) {
    const answer = await api.call(method, path);
    expect([answer.status, answer.json['code']]).toEqual([405, 'method-not-allowed']);
    expect(answer.headers['allow']).toBe(allow);
  }
  expect((await api.call('GET', '/v1/none')).status).toBe(404);
});

test.each(['Web-Ready', 'x y', 'a..b', '../x', 'a\u0000b', '-a', '', 'a'.repeat(129)])(
  'the alias %j, which the catalog would refuse, is refused with the rule and starts nothing',
  async (alias) => {
    await using api = await startHarness();
    api.captures.vms.set('web', vmOf('web', '/run/web.sock'));
    const children = [{ socketPath: '/run/child.sock' }];
    for (const [path, body] of [
      ['/v1/vms/web/captures', { alias }],
      ['/v1/vms/web/forks', { alias, children }],
      ['/v1/aliases', { alias, snapshotId: 'any' }],
    ] as const) {
      const answer = await api.call('POST', path, body);
      expect([path, answer.status]).toEqual([path, 422]);
      expect(answer.text).toContain('lowercase letters');
    }
    expect(api.captures.requests).toEqual([]);
  },
);
