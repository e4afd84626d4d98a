import { expect, test } from 'vitest';
import { allHashes, firstDifference, Harness } from '../capture/harness.ts';

const config = { lineage: { max_chain: 6 } };

test('twenty captures of a small VM stay within max_chain, and each restores exactly', async () => {
  await using harness = await Harness.make(config);
  await using vm = await harness.vm({ dialect: 'e2b', memoryMib: 32 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  const kept: { readonly snapshot: string; readonly hashes: BigUint64Array }[] = [];
  for (let i = 0; i < 20; i += 1) {
    await vm.run({ pages: { firstPage: 2000 + 13 * i, pageCount: 40 }, value: i + 1 });
    if (i % 4 === 3) await vm.removePages({ firstPage: 2000 + 13 * i, pageCount: 9 });
    const hashes = await allHashes(vm);
    const made = await harness.published(vmId, { resumeAfter: i % 2 === 0 ? 'copy' : 'publish' });
    expect(made.chainDepth).toBeLessThanOrEqual(6);
    if (i % 6 === 1 || i === 19) kept.push({ snapshot: made.snapshotId, hashes });
  }
  for (const { snapshot, hashes } of kept) {
    await using copy = await harness.restore(snapshot, { dialect: 'e2b' });
    expect(firstDifference(await allHashes(copy), hashes)).toBeNull();
  }
  expect(harness.warnings).toEqual([]);
});

test.each([
  ['which stays as it is', 6],
  ['some of which has to be merged', 3],
])('layers on a launch parent %s hold what was written, no more', async (_how, maxChain) => {
  await using harness = await Harness.make({ lineage: { max_chain: maxChain } });
  const options = { dialect: 'e2b', memoryMib: 16, dirtyEpochs: true } as const;
  await using source = await harness.vm(options);
  const { vmId } = await harness.attach(source, { trackingMode: 'dirty' });
  await source.run({ pages: { firstPage: 1000, pageCount: 300 }, value: 1 });
  await harness.published(vmId);
  await source.run({ pages: { firstPage: 2000, pageCount: 200 }, value: 2 });
  const launch = (await harness.published(vmId)).snapshotId;
  await using child = await harness.restore(launch, { ...options, track: true });
  await child.resume();
  const from = { trackingMode: 'dirty', launchParent: launch } as const;
  const attached = await harness.attach(child, from);
  let depth = 0;
  let last = '';
  let compacted = false;
  for (let i = 0; i < 7; i += 1) {
    await child.run({ pages: { firstPage: 3000 + i, pageCount: 1 }, value: 3 });
    const made = await harness.published(attached.vmId);
    expect(made.dataBytes).toBeLessThan(40 * 4096);
    compacted ||= made.chainDepth <= depth;
    depth = made.chainDepth;
    last = made.snapshotId;
  }
  expect(compacted).toBe(true);
  const expected = await allHashes(child);
  await using copy = await harness.restore(last, { dialect: 'e2b' });
  expect(firstDifference(await allHashes(copy), expected)).toBeNull();
});
