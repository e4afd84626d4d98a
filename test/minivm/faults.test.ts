import { expect, test } from 'vitest';
import { launchMiniVm } from '../../src/minivm/launch.ts';
import { fault } from './helpers.ts';

const small = { memoryMib: 16, dialect: 'aenv' } as const;
const killed = { code: null, signal: 'SIGKILL' };

test('a VM can die before, after and instead of an answer', async () => {
  for (const when of ['before', 'done'] as const) {
    await using vm = await launchMiniVm(small);
    await vm.fault({ on: 'pause', action: 'die', when });
    await expect(vm.pause()).rejects.toThrow();
    expect(await vm.exited).toEqual(killed);
  }
  await using vm = await launchMiniVm(small);
  await vm.fault({ on: 'dirty', action: 'die', when: 'answered' });
  await vm.pause();
  expect((await vm.send('GET', '/vm/dirty-memory-ranges')).status).toBe(200);
  expect(await vm.exited).toEqual(killed);
});

test('a VM can die at the nth request, and at once', async () => {
  await using vm = await launchMiniVm(small);
  await vm.fault({ on: 'any', action: 'die', skip: 2 });
  await vm.pause();
  await vm.resume();
  await expect(vm.pause()).rejects.toThrow();
  expect(await vm.exited).toEqual(killed);
  await using other = await launchMiniVm(small);
  await other.fault({ on: 'now', action: 'die', afterMs: 1 });
  expect(await other.exited).toEqual(killed);
});

test('a refusal is answered as often as asked, and done or not done as asked', async () => {
  await using vm = await launchMiniVm(small);
  await vm.fault({ on: 'pause', action: 'refuse', times: 2, message: 'not today' });
  expect(await fault(vm, 'PATCH', '/vm', { state: 'Paused' })).toBe('not today');
  expect(await fault(vm, 'PATCH', '/vm', { state: 'Paused' })).toBe('not today');
  expect((await vm.info()).state).toBe('Running');
  await vm.pause();
  await vm.fault({ on: 'resume', action: 'refuse', when: 'done' });
  await expect(vm.resume()).rejects.toThrow('scripted fault');
  expect((await vm.info()).state).toBe('Running');
});

test('a hanging request is never answered, while others are', async () => {
  await using vm = await launchMiniVm(small);
  await vm.fault({ on: 'snapshot-create', action: 'hang' });
  await vm.pause();
  const hung = vm.createSnapshot({ type: 'Diff', snapshotPath: '/nowhere' });
  let settled = false;
  const after = hung.then(
    () => (settled = true),
    () => (settled = true),
  );
  expect((await vm.info()).state).toBe('Paused');
  expect(settled).toBe(false);
  await vm.kill();
  await after;
});

test('a delay delays, and garbage is garbage', async () => {
  await using vm = await launchMiniVm(small);
  await vm.fault({ on: 'describe', action: 'delay', afterMs: 120 });
  const from = performance.now();
  expect((await vm.send('GET', '/version')).status).toBe(200);
  expect(performance.now() - from).toBeGreaterThanOrEqual(119);
  await vm.fault({ on: 'dirty', action: 'garbage' });
  const { status, body } = await vm.send('GET', '/vm/dirty-memory-ranges');
  expect(status).toBe(200);
  expect(() => JSON.parse(body.toString()) as unknown).toThrow(SyntaxError);
  await vm.fault({ on: 'dirty', action: 'garbage', times: 0 });
  await vm.clearFaults();
  expect((await vm.send('GET', '/vm/dirty-memory-ranges')).body.toString()).toMatch(/\]\}$/);
});

test('the request log counts pauses and resumes', async () => {
  await using vm = await launchMiniVm(small);
  await vm.clearRequests();
  await vm.pause();
  await vm.counters();
  await vm.resume();
  expect(await vm.requests()).toEqual([
    { method: 'PATCH', path: '/vm', operation: 'pause', status: 204 },
    { method: 'PATCH', path: '/vm', operation: 'resume', status: 204 },
  ]);
});

test('an unreadable page is refused to the VMM’s own readers; the guest goes on', async () => {
  await using vm = await launchMiniVm({ ...small, backend: 'thread' });
  await vm.setUnreadable(77);
  await vm.run({ pages: { firstPage: 70, pageCount: 20 } });
  await expect(vm.hashes(70, 20)).rejects.toThrow('Page 77 was made unreadable');
  await vm.setUnreadable(77, false);
  expect((await vm.readBytes(77 * 4096, 4096)).every((byte) => byte === 0)).toBe(true);
});

test('the layout can change under a running VM', async () => {
  await using vm = await launchMiniVm(small);
  const grown = await vm.addRegion({ guestAddress: 1n << 32n, bytes: 1024 * 1024 });
  expect(grown.imageBytes).toBe(17 * 1024 * 1024);
  await vm.run({ pages: { pages: [4096] } });
  expect((await vm.dropRegion()).imageBytes).toBe(16 * 1024 * 1024);
  await expect(vm.dropRegion()).rejects.toThrow('last region');
});
