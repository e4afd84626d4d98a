import { expect, test } from 'vitest';
import { allHashes, firstDifference, Harness } from '../capture/harness.ts';

const config = { lineage: { max_chain: 6 } };

test('twenty captures of a small VM stay within max_chain, and each restores exactly', async () => {
  await using harness = await Harness.make(config);
  await using vm = await harness.vm({ dialect: 'e2b', memoryMib: 32, backend: 'thread' });
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
    await using copy = await harness.restore(snapshot, { dialect: 'e2b', backend: 'thread' });
    expect(firstDifference(await allHashes(copy), hashes)).toBeNull();
  }
  expect(harness.warnings).toEqual([]);
});
