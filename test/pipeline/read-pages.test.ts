import { expect, test } from 'vitest';
import { launchMiniVm } from '../../src/minivm/launch.ts';
import { StageMeter } from '../../src/pipeline/meter.ts';
import type { PoolClient } from '../../src/pipeline/pool.ts';
import type { SlabHolder } from '../../src/pipeline/slabs.ts';
import { Failure } from '../../src/result.ts';
import type { RangeBatch } from '../../src/stages/items.ts';
import { readPages } from '../../src/stages/read.ts';
import { identify, identityError } from '../../src/vmm/identity.ts';

/** Zeroes need no reading: neither workers nor slabs are asked. */
const zeros: RangeBatch = {
  kind: 'zeros',
  rows: BigUint64Array.of(0n, 4096n, 4096n),
  bytes: 4096,
  round: 0,
};

test.each([
  { dies: 'before the first', batches: 0 },
  { dies: 'after the last', batches: 1 },
])(
  'a process that exits $dies batch fails the read, and the VM is not said to be copied',
  async (c) => {
    await using vm = await launchMiniVm({ memoryMib: 16 });
    const identified = identify(vm.socketPath);
    if (!identified.ok) throw new Error(identified.error.message);
    using identity = identified.value;
    async function* input(): AsyncIterable<RangeBatch> {
      yield zeros;
      await vm.kill();
    }
    if (c.batches === 0) await vm.kill();
    let copied = false;
    const stage = readPages(
      { inFlightMax: 1, noMemoryDeadlineMs: 1 },
      {
        pool: null as unknown as PoolClient,
        slabs: null as unknown as SlabHolder,
        cancelSlot: 0,
        memoryFileFd: () => -1,
        stoodStill: () => Promise.resolve(),
        checkIdentity: () => {
          const check = identity.check();
          if (check !== 'same') throw new Failure(identityError(identity, check));
        },
        copied: () => (copied = true),
      },
    );
    const { signal } = new AbortController();
    const meter = new StageMeter(
      'read',
      () => 0,
      () => undefined,
    );
    const read: string[] = [];
    const run = async (): Promise<void> => {
      for await (const batch of stage.run(input(), { signal, meter })) read.push(batch.kind);
    };
    await expect(run()).rejects.toMatchObject({ detail: { kind: 'vm-exited' } });
    expect(read).toHaveLength(c.batches);
    expect(copied).toBe(false);
  },
);
