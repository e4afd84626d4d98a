import { join } from 'node:path';
import { describe, expect, test } from 'vitest';
import type { CaptureResult } from '../../src/capture/types.ts';
import { bitmapCount } from '../../src/native/guest.ts';
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

test('of 200,000 pages read and 100 written, mode dirty stores 100, mode mincore what is there', async () => {
  await using harness = await Harness.make();
  const captured: CaptureResult[] = [];
  for (const trackingMode of ['dirty', 'mincore'] as const) {
    await using vm = await harness.vm({
      dialect: 'e2b',
      memoryMib: 1024,
      track: trackingMode === 'dirty',
    });
    const { vmId } = await harness.attach(vm, { trackingMode });
    await vm.run({ pages: { firstPage: 1024, pageCount: 200_000 }, fill: 'read' });
    await vm.run({ pages: { seed: 6, count: 100, firstPage: 1024 }, value: 5 });
    const written = pagesOfWords(await vm.set('dirty'));
    const resident = pagesOfWords(await vm.set('resident'));
    expect(resident).toBeGreaterThanOrEqual(200_000);
    const made = await harness.published(vmId);
    if (trackingMode === 'dirty') expect(made.selectedPages).toBe(written);
    captured.push(made);
  }
  const [dirty, mincore] = captured;
  // Where the kernel shows its zero page, pages that were only read are left out before the copy.
  expect(mincore?.selectedPages).toBeGreaterThanOrEqual(100);
  expect(mincore?.dataBytes).toBe(100 * 4096);
  expect(dirty).toMatchObject({ selectedPages: 100, dataBytes: 100 * 4096 });
});

test('a restored guest that only reads makes an almost empty layer in mode dirty', async () => {
  await using harness = await Harness.make();
  await using vm = await harness.vm({ dialect: 'e2b', memoryMib: 1024 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  await vm.run({ pages: { firstPage: 1024, pageCount: 20_000 }, value: 3, words: 2 });
  const base = await harness.published(vmId);
  for (const trackingMode of ['dirty', 'mincore'] as const) {
    await using child = await harness.restore(base.snapshotId, { dialect: 'e2b' });
    await child.resume();
    const { vmId: childId } = await harness.attach(child, {
      trackingMode,
      launchParent: base.snapshotId,
    });
    await child.run({ pages: { firstPage: 1024, pageCount: 200_000 }, fill: 'read' });
    const made = await harness.published(childId, { dedup: 'off' });
    if (trackingMode === 'dirty') expect(made.dataBytes / 4096).toBeLessThanOrEqual(8);
    else expect(made.selectedPages).toBeGreaterThanOrEqual(200_000);
  }
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
    ['a path that is not one line', '/run/vm\n.sock', 'path-invalid'],
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

const pagesOfWords = (words: BigUint64Array): number =>
  bitmapCount(new Uint8Array(words.buffer, words.byteOffset, words.byteLength));
