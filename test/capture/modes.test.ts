import { join } from 'node:path';
import { describe, expect, test } from 'vitest';
import { allHashes, firstDifference, Harness } from './harness.ts';

describe.each(['firecracker', 'aenv', 'e2b'] as const)('dialect %s', (dialect) => {
  test('mode mincore takes what is resident, and restores exactly', async () => {
    await using harness = await Harness.make();
    await using vm = await harness.vm({ dialect, memoryMib: 64, track: false });
    const { vmId } = await harness.attach(vm, { trackingMode: 'mincore' });
    await vm.run({ pages: { seed: 4, count: 300, firstPage: 1024 }, value: 3 });
    const base = await harness.published(vmId);
    expect(base.selectedPages).toBeGreaterThanOrEqual(300);
    await vm.run({ pages: { firstPage: 9000, pageCount: 40 }, value: 4 });
    const expected = await allHashes(vm);
    const next = await harness.published(vmId);
    expect(next.dataBytes / 4096).toBeLessThan(60);
    await using copy = await harness.restore(next.snapshotId, { dialect });
    expect(firstDifference(await allHashes(copy), expected)).toBeNull();
  });
});

test('a restored guest that only reads makes an almost empty layer in mode dirty', async () => {
  await using harness = await Harness.make();
  await using vm = await harness.vm({ dialect: 'e2b', memoryMib: 256 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  await vm.run({ pages: { firstPage: 1024, pageCount: 20_000 }, value: 3, words: 2 });
  const base = await harness.published(vmId);
  await using child = await harness.restore(base.snapshotId, { dialect: 'e2b' });
  await child.resume();
  const attached = await harness.attach(child, {
    trackingMode: 'dirty',
    launchParent: base.snapshotId,
  });
  await child.run({ pages: { firstPage: 1024, pageCount: 50_000 }, fill: 'read' });
  const made = await harness.published(attached.vmId);
  expect(made.dataBytes / 4096).toBeLessThanOrEqual(8);
});

test('pages that a balloon took away read zero in the next snapshot', async () => {
  await using harness = await Harness.make();
  await using vm = await harness.vm({ dialect: 'e2b', memoryMib: 32 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  await vm.run({ pages: { firstPage: 2000, pageCount: 100 }, value: 3 });
  await harness.published(vmId);
  await vm.removePages({ firstPage: 2010, pageCount: 30 });
  const made = await harness.published(vmId);
  expect(made.zeroedBytes).toBe(30 * 4096);
  await using copy = await harness.restore(made.snapshotId, { dialect: 'e2b' });
  const bytes = await copy.readBytes(2010 * 4096, 30 * 4096);
  expect(bytes.every((byte) => byte === 0)).toBe(true);
});

describe('an attach is refused with what is wrong, and leaves nothing', () => {
  test.each([
    ['a path outside the allowed roots', '/etc/passwd', 'path-outside-roots'],
    ['a path that is not absolute', 'vm.sock', 'path-invalid'],
    ['a missing socket', 'none.sock', 'path-missing'],
    ['a file that is no socket', 'state/node.db', 'vmm-not-a-vmm'],
  ])('%s', async (_what, name, kind) => {
    await using harness = await Harness.make();
    const absolute = name.startsWith('/') || name === 'vm.sock';
    const socketPath = absolute ? name : join(harness.folder, name);
    const answer = await harness.service.attach({ socketPath });
    expect(answer.ok ? 'attached' : answer.error.kind).toBe(kind);
    expect(harness.service.listVms()).toEqual([]);
  });

  test('mode dirty of a VM that runs without tracking', async () => {
    await using harness = await Harness.make();
    await using vm = await harness.vm({ dialect: 'aenv', memoryMib: 16, track: false });
    const { socketPath } = vm;
    const answer = await harness.service.attach({ socketPath, trackingMode: 'dirty' });
    expect(answer.ok ? 'attached' : answer.error.kind).toBe('tracking-off');
  });
});
