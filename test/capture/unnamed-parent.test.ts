import { expect, test } from 'vitest';
import { allHashes, firstDifference, Harness } from './harness.ts';

const cases = (['firecracker', 'aenv', 'e2b'] as const).flatMap((dialect) =>
  (['dirty', 'mincore'] as const).map((trackingMode) => ({ dialect, trackingMode })),
);

// Its pages lie in the file that it was restored from, and no layer of ours holds them.
test.each(cases)(
  '$dialect, mode $trackingMode: a restored VM attached without its launch parent is captured whole',
  async ({ dialect, trackingMode }) => {
    await using harness = await Harness.make();
    let snapshot = '';
    {
      await using first = await harness.vm({ dialect, memoryMib: 16 });
      const { vmId } = await harness.attach(first, { trackingMode });
      await first.run({ pages: { firstPage: 1000, pageCount: 300 }, value: 1 });
      snapshot = (await harness.published(vmId)).snapshotId;
    }
    await using vm = await harness.restore(snapshot, { dialect });
    await vm.resume();
    await vm.run({ pages: { firstPage: 1100, pageCount: 5 }, value: 2 });
    const { vmId } = await harness.attach(vm, { trackingMode });
    const made = await harness.published(vmId);
    expect(made.predecessor).toBeNull();
    const expected = await allHashes(vm);
    await using copy = await harness.restore(made.snapshotId, { dialect });
    expect(firstDifference(await allHashes(copy), expected)).toBeNull();
  },
);
