import { expect, test } from 'vitest';
import { allHashes, firstDifference, Harness } from './harness.ts';

const MIB = 1024 * 1024;
const regions = [
  { guestAddress: 0n, bytes: 12 * MIB },
  { guestAddress: 0x1_0000_0000n, bytes: 4 * MIB },
];

test('upstream, two regions that nobody tells apart: pages removed since the parent read zero', async () => {
  await using harness = await Harness.make();
  const shape = { dialect: 'firecracker', memoryMib: 16 } as const;
  await using vm = await harness.vm({ ...shape, regions });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  await vm.run({ pages: { firstPage: 1000, pageCount: 300 }, value: 1 });
  await harness.published(vmId);
  await vm.removePages({ firstPage: 1100, pageCount: 50 });
  const expected = await allHashes(vm);
  const made = await harness.published(vmId);
  expect(made.dataBytes).toBe(0);
  await using copy = await harness.restore(made.snapshotId, shape);
  expect(firstDifference(await allHashes(copy), expected)).toBeNull();
});

test('removed pages take no blocks of a compressed layer', async () => {
  await using harness = await Harness.make({ memory_snapshot: { compression: 'lz4' } });
  const shape = { dialect: 'e2b', memoryMib: 16 } as const;
  await using vm = await harness.vm(shape);
  const { vmId } = await harness.attach(vm, { trackingMode: 'mincore' });
  await vm.run({ pages: { firstPage: 1000, pageCount: 300 }, value: 1 });
  await harness.published(vmId);
  await vm.removePages({ firstPage: 1100, pageCount: 50 });
  const made = await harness.published(vmId);
  // Only now: reading a removed page puts one there.
  const expected = await allHashes(vm);
  expect(made.zeroedBytes).toBe(50 * 4096);
  await using copy = await harness.restore(made.snapshotId, shape);
  expect(firstDifference(await allHashes(copy), expected)).toBeNull();
});
