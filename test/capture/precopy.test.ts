import { afterEach, describe, expect, test, vi } from 'vitest';
import type { OpenCatalog } from '../../src/catalog/open.ts';
import type { Catalog } from '../../src/catalog/catalog.ts';
import { LayerWriter, type SegmentBatch } from '../../src/layer/layer-writer.ts';
import type { MiniVm } from '../../src/minivm/launch.ts';
import type { VmId } from '../../src/units.ts';
import { allBytes, firstDifferingPage, Harness } from './harness.ts';

/** Small batches: a round of a hundred pages is worth copying ahead. */
function make(
  precopy: Record<string, unknown>,
  sections: Record<string, unknown> = {},
  around?: (catalog: OpenCatalog) => Catalog,
): Promise<Harness> {
  const pipeline = { slab_budget: '4MiB', slab_bytes: '64KiB', coalesce: { batch_bytes: '64KiB' } };
  const overrides = { pipeline: { ...pipeline, precopy }, ...sections };
  return Harness.make(overrides, {}, around === undefined ? {} : { around });
}

afterEach(() => vi.restoreAllMocks());

/** Runs `act` once: when a copy of this page is in the layer's file, and before the next step. */
function onceCopied(page: number, act: () => Promise<void>): void {
  const real = Object.getOwnPropertyDescriptor(LayerWriter.prototype, 'append')?.value as (
    this: LayerWriter,
    batch: SegmentBatch,
  ) => Promise<void>;
  const spy = vi.spyOn(LayerWriter.prototype, 'append');
  spy.mockImplementation(async function (this: LayerWriter, batch) {
    await real.call(this, batch);
    if (!holds(batch, page)) return;
    spy.mockImplementation(real);
    await act();
  });
}

function holds({ rows }: SegmentBatch, page: number): boolean {
  for (let row = 0; row < rows.length; row += 3) {
    const first = Number(rows[row] ?? 0n) / 4096;
    if (first <= page && page < first + Number(rows[row + 1] ?? 0n) / 4096) return true;
  }
  return false;
}

/** Runs `act` once: a round's epoch has begun, and nothing of the round is copied. */
function onceBegun(harness: Harness, act: () => Promise<void>): void {
  const { nodeDb } = harness;
  const real = nodeDb.recordSetAsync.bind(nodeDb);
  vi.spyOn(nodeDb, 'recordSetAsync').mockImplementationOnce(async (...call) => {
    const recorded = await real(...call);
    await act();
    return recorded;
  });
}

async function wasPaused(vm: MiniVm): Promise<boolean> {
  return (await vm.requests()).some((each) => each.method === 'PATCH' && each.path === '/vm');
}

/** Captures, and compares the restored guest with the guest as it stands. */
async function exact(
  harness: Harness,
  vm: MiniVm,
  vmId: VmId,
  request: Parameters<Harness['published']>[1] = {},
): Promise<Awaited<ReturnType<Harness['published']>>> {
  const made = await harness.published(vmId, request);
  const now = await allBytes(vm);
  expect(firstDifferingPage(await harness.memoryOf(made.snapshotId), now)).toBeNull();
  return made;
}

const firstPage = 2000;
const pages = { firstPage, pageCount: 200 };

describe.each([
  ['aenv', 'none'],
  ['e2b', 'lz4'],
] as const)('dialect %s, compression %s', (dialect, compression) => {
  test('a guest that writes all the time is captured as it was at the pause, again and again', async () => {
    const paused: Buffer[] = [];
    const seen: MiniVm[] = [];
    // The VM stays paused until the snapshot is in the catalog.
    const around = (real: OpenCatalog): Catalog =>
      new Proxy<Catalog>(real, {
        get: (target, name) =>
          name === 'publish'
            ? async (...call: Parameters<Catalog['publish']>) => {
                for (const each of seen) paused.push(await allBytes(each));
                return real.publish(...call);
              }
            : (Reflect.get(target, name) as unknown),
      });
    const sections = { memory_snapshot: { compression } };
    await using harness = await make({ rounds: 3 }, sections, around);
    await using guest = await harness.vm({ dialect, memoryMib: 16, dirtyEpochs: true });
    seen.push(guest);
    const { vmId } = await harness.attach(guest, { trackingMode: 'dirty' });
    await guest.run({ pages: { firstPage, pageCount: 1200 }, value: 7 });
    const hot = { seed: 3, count: 300, firstPage, spanPages: 900 };
    await guest.program({ pages: hot, loop: true, pagesPerSecond: 10_000 });
    for (let epoch = 0; epoch < 2; epoch++) {
      await guest.removePages({ firstPage: 3000 + epoch * 40, pageCount: 40 });
      const made = await harness.published(vmId);
      expect(made.precopyRounds).toBeGreaterThanOrEqual(epoch === 0 ? 1 : 0);
      expect(made.chainDepth).toBe(epoch + 1);
      const atPause = paused[epoch] ?? Buffer.alloc(0);
      const restored = await harness.memoryOf(made.snapshotId);
      expect(firstDifferingPage(restored, atPause)).toBeNull();
    }
    expect(harness.warnings).toEqual([]);
  });
});

describe.each([
  { rounds: 1, then: 'in the pause' },
  { rounds: 2, then: 'in a later round' },
])('pages that were copied ahead and change, found $then', ({ rounds }) => {
  /** What a guest may do to pages that were copied: each leaves the copy stale in its own way. */
  async function change(vm: MiniVm): Promise<void> {
    await vm.run({ pages: { firstPage, pageCount: 20 }, fill: 'constant', value: 1 });
    await vm.run({ pages: { firstPage: firstPage + 20, pageCount: 20 }, fill: 'zero' });
    await vm.removePages({ firstPage: firstPage + 40, pageCount: 20 });
    await vm.deviceWrites({ pages: { firstPage: firstPage + 60, pageCount: 20 }, value: 9 });
    await vm.run({ pages: { firstPage: firstPage + 80, pageCount: 20 }, value: 5 });
    await vm.removePages({ firstPage: firstPage + 90, pageCount: 20 });
  }

  test('on a parent', async () => {
    await using harness = await make({ rounds });
    await using vm = await harness.vm({ dialect: 'e2b', memoryMib: 16, dirtyEpochs: true });
    const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
    await vm.run({ pages, fill: 'constant', value: 1 });
    await harness.published(vmId);
    await vm.run({ pages, fill: 'constant', value: 2 });
    onceCopied(firstPage + 199, () => change(vm));
    const made = await exact(harness, vm, vmId, { dedup: 'parent' });
    expect(made.precopyRounds).toBe(rounds);
    expect(made.precopiedPages).toBe(rounds === 1 ? 90 : 200);
    expect(made.supersededBytes).toBe(110 * 4096);
    expect(made.dataBytes + made.zeroedBytes).toBe(200 * 4096);
    expect(made.selection).toBe('epoch');
    await exact(harness, vm, vmId);
  });

  test('without a parent', async () => {
    await using harness = await make({ rounds });
    await using vm = await harness.vm({ dialect: 'aenv', memoryMib: 16, dirtyEpochs: true });
    const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
    await vm.run({ pages, fill: 'constant', value: 2 });
    onceCopied(firstPage + 199, () => change(vm));
    const made = await exact(harness, vm, vmId);
    expect(made.predecessor).toBeNull();
    expect(made.precopyRounds).toBe(rounds);
  });
});

test('a restored VM whose launch parent is not named is captured whole all the same', async () => {
  await using harness = await make({ rounds: 1 });
  await using vm = await harness.vm({ dialect: 'e2b', memoryMib: 16, dirtyEpochs: true });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  await vm.run({ pages: { firstPage, pageCount: 400 }, value: 1 });
  const { snapshotId } = await harness.published(vmId);
  const options = { dialect: 'e2b', dirtyEpochs: true } as const;
  await using child = await harness.restore(snapshotId, options);
  await child.resume();
  const attached = await harness.attach(child, { trackingMode: 'dirty' });
  await child.run({ pages, value: 2 });
  const made = await exact(harness, child, attached.vmId);
  expect(made).toMatchObject({ predecessor: null, precopyRounds: 1 });
});

test('clean pages between written ones are not read along while the VM runs', async () => {
  const batches = { batch_bytes: '64KiB', join_gap_pages: 4 };
  const pipeline = { slab_budget: '4MiB', slab_bytes: '64KiB', coalesce: batches };
  const sections = { pipeline: { ...pipeline, precopy: { rounds: 1 } } };
  await using harness = await make({}, sections);
  await using vm = await harness.vm({ dialect: 'e2b', memoryMib: 16, dirtyEpochs: true });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  await vm.run({ pages: { firstPage, pageCount: 100 }, value: 1 });
  await vm.run({ pages: { firstPage: firstPage + 102, pageCount: 98 }, value: 1 });
  onceBegun(harness, () =>
    vm.run({ pages: { pages: [2100, 2101] }, value: 2 }).then(() => undefined),
  );
  onceCopied(firstPage + 199, () => vm.removePages({ firstPage: 2100, pageCount: 2 }));
  const made = await exact(harness, vm, vmId);
  expect(made.precopyRounds).toBe(1);
});

describe('a capture that fails after a round never stopped the VM, and the next one is complete', () => {
  test.each([
    { why: 'a page that cannot be read', kind: 'unreadable-page' },
    { why: 'a VMM that refuses the next epoch', kind: 'vmm-refused' },
    { why: 'a caller that cancels', kind: 'cancelled' },
  ])('$why', async ({ kind }) => {
    await using harness = await make({ rounds: 2 });
    await using vm = await harness.vm({ dialect: 'aenv', memoryMib: 16, dirtyEpochs: true });
    const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
    await vm.run({ pages, value: 1 });
    const base = await harness.published(vmId);
    await vm.clearRequests();
    await vm.run({ pages, value: 2 });
    await vm.removePages({ firstPage: firstPage + 150, pageCount: 20 });
    onceCopied(firstPage + 199, async () => {
      await vm.run({ pages: { firstPage, pageCount: 50 }, value: 3 });
      if (kind === 'unreadable-page') await vm.setUnreadable(firstPage + 30);
      if (kind === 'vmm-refused') await vm.fault({ on: 'epoch', action: 'refuse' });
      const running = harness.service.getVm(vmId)?.captureId ?? null;
      // Not awaited: it answers when the capture has ended.
      if (kind === 'cancelled' && running !== null) void harness.service.cancelCapture(running);
    });
    const failed = await harness.capture(vmId);
    expect(failed).toMatchObject({ status: 'aborted', failure: { kind }, vmRunning: null });
    expect(await wasPaused(vm)).toBe(false);
    expect((await harness.leftovers()).staging).toEqual([]);
    await vm.clearFaults();
    await vm.setUnreadable(firstPage + 30, false);
    vi.restoreAllMocks();
    const made = await exact(harness, vm, vmId);
    expect(made.predecessor).toBe(base.layer);
    // What the failed capture had read from the VMM is in no set of the VMM any more.
    expect(made.selectedPages).toBe(200);
    expect(harness.warnings).toEqual([]);
  });

  test('a daemon that ends between a round and the pause', async () => {
    await using harness = await make({ rounds: 2 });
    await using vm = await harness.vm({ dialect: 'e2b', memoryMib: 16, dirtyEpochs: true });
    const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
    await vm.run({ pages, value: 1 });
    await harness.published(vmId);
    await vm.run({ pages, value: 2 });
    let copied: () => void = () => undefined;
    const between = new Promise<void>((resolve) => (copied = resolve));
    onceCopied(firstPage + 199, async () => {
      await Promise.resolve();
      copied();
    });
    await harness.startCapture(vmId);
    await between;
    await harness.stop();
    await harness.start();
    const made = await exact(harness, vm, vmId);
    expect(made.selectedPages).toBe(200);
  });
});

test('a round that would pass bytes_max is left to the pause', async () => {
  await using harness = await make({ rounds: 4, bytes_max: '1MiB' });
  await using vm = await harness.vm({ dialect: 'e2b', memoryMib: 16, dirtyEpochs: true });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  await vm.run({ pages: { firstPage, pageCount: 257 }, value: 1 });
  const whole = await harness.published(vmId);
  expect(whole).toMatchObject({ precopyRounds: 0, precopiedPages: 0 });
  await vm.run({ pages, value: 2 });
  onceCopied(firstPage + 199, async () => {
    await vm.run({ pages: { firstPage, pageCount: 100 }, value: 3 });
  });
  const made = await exact(harness, vm, vmId);
  expect(made).toMatchObject({ precopyRounds: 1, precopiedPages: 100, selectedPages: 200 });
});

test('rounds end when a set no longer shrinks', async () => {
  await using harness = await make({ rounds: 4 });
  await using vm = await harness.vm({ dialect: 'e2b', memoryMib: 16, dirtyEpochs: true });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  await vm.run({ pages, value: 2 });
  onceCopied(firstPage + 199, () => vm.run({ pages, value: 3 }).then(() => undefined));
  expect(await exact(harness, vm, vmId)).toMatchObject({ precopyRounds: 1, precopiedPages: 0 });
});

test.each([
  { without: 'epochs of the VMM', options: { dirtyEpochs: false }, sections: {} },
  {
    without: 'a source that can be asked while the VM runs',
    options: { dirtyEpochs: true },
    sections: { memory_snapshot: { tracking_shadow: 'pagemap' } },
  },
])('nothing is copied ahead without $without', async ({ options, sections }) => {
  await using harness = await make({ rounds: 2 }, sections);
  await using vm = await harness.vm({ dialect: 'aenv', memoryMib: 16, ...options });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  await vm.run({ pages, value: 2 });
  const made = await harness.published(vmId);
  expect(made).toMatchObject({ precopyRounds: 0, precopiedPages: 0, supersededBytes: 0 });
});

test('a request asks for more rounds than are configured, or for none', async () => {
  for (const [rounds, precopyRounds] of [
    [0, 2],
    [2, 0],
  ] as const) {
    await using harness = await make({ rounds });
    await using vm = await harness.vm({ dialect: 'e2b', memoryMib: 16, dirtyEpochs: true });
    const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
    await vm.run({ pages, value: 2 });
    // Only while it runs can a guest write.
    if (precopyRounds > 0) {
      onceCopied(firstPage + 199, async () => {
        await vm.run({ pages: { firstPage, pageCount: 50 }, value: 3 });
      });
    }
    const made = await exact(harness, vm, vmId, { precopyRounds });
    expect(made.precopyRounds).toBe(precopyRounds);
    vi.restoreAllMocks();
  }
});

test.each([
  { of: 'upstream', mode: 'dirty', options: { dialect: 'firecracker' }, sections: {} },
  { of: 'a VMM without epochs', mode: 'dirty', options: { dialect: 'e2b' }, sections: {} },
  {
    of: 'mode mincore',
    mode: 'mincore',
    options: { dialect: 'e2b', dirtyEpochs: true },
    sections: {},
  },
  {
    of: 'a shadowed source',
    mode: 'dirty',
    options: { dialect: 'aenv', dirtyEpochs: true },
    sections: { memory_snapshot: { tracking_shadow: 'pagemap' } },
  },
] as const)('rounds are refused of $of, and nothing is recorded', async (each) => {
  await using harness = await make({ rounds: 2 }, each.sections);
  await using vm = await harness.vm({ memoryMib: 16, ...each.options });
  const { vmId } = await harness.attach(vm, { trackingMode: each.mode });
  const answer = await harness.service.startCapture(vmId, { precopyRounds: 1 });
  expect(answer.ok ? '' : answer.error.kind).toBe('precopy-unsupported');
  expect(answer.ok ? '' : answer.error.message).toContain(`mode ${each.mode}`);
  expect(harness.service.listCaptures(vmId)).toEqual([]);
  const children = [{ socketPath: `${harness.folder}/child.sock` }];
  const forked = await harness.service.fork(vmId, { precopyRounds: 1, children });
  expect(forked.ok ? '' : forked.error.kind).toBe('precopy-unsupported');
  expect(await harness.published(vmId, { precopyRounds: 0 })).toMatchObject({ precopyRounds: 0 });
});

test('nothing is copied ahead of a VM that its owner has paused', async () => {
  await using harness = await make({ rounds: 2 });
  await using vm = await harness.vm({ dialect: 'aenv', memoryMib: 16, dirtyEpochs: true });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  await vm.run({ pages, value: 2 });
  await vm.pause();
  const made = await harness.published(vmId);
  expect(made).toMatchObject({ precopyRounds: 0, precopiedPages: 0 });
});

test('compaction goes on before the pause also when the VM resumes after the copy', async () => {
  await using harness = await make({ rounds: 1 });
  await using vm = await harness.vm({ dialect: 'e2b', memoryMib: 32, dirtyEpochs: true });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  // Far more than the slabs hold.
  await vm.run({ pages: { firstPage, pageCount: 4000 }, value: 2 });
  const made = await exact(harness, vm, vmId, { resumeAfter: 'copy' });
  expect(made).toMatchObject({ precopyRounds: 1, precopiedPages: 4000 });
});
