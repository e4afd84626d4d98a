import { afterEach, describe, expect, test, vi } from 'vitest';
import { Engine } from '../../src/capture/engine.ts';
import { LayerWriter } from '../../src/layer/layer-writer.ts';
import { VmmClient } from '../../src/vmm/client.ts';
import { allHashes, firstDifference, Harness, valueOf } from './harness.ts';

afterEach(() => vi.restoreAllMocks());

const turn = (): Promise<void> => new Promise((resolve) => setImmediate(resolve));

const dialects = ['firecracker', 'aenv', 'e2b'] as const;

describe.each(dialects)('dialect %s, mode dirty', (dialect) => {
  test('S1 holds A, S2 holds A and B, and a failed capture between them loses nothing', async () => {
    await using harness = await Harness.make();
    await using vm = await harness.vm({ dialect, memoryMib: 64 });
    const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
    await vm.run({ pages: { seed: 1, count: 500, firstPage: 1024 }, value: 1 });
    const base = await harness.published(vmId);
    expect(base.predecessor).toBeNull();

    await vm.run({ pages: { firstPage: 2000, pageCount: 64 }, value: 2 });
    const atS1 = await allHashes(vm);
    const s1 = await harness.published(vmId);

    await vm.run({ pages: { firstPage: 3000, pageCount: 32 }, value: 3 });
    // After the dirty set was read where the bytes come from the process; while it is read
    // otherwise.
    if (dialect === 'firecracker') await vm.fault({ on: 'snapshot-create', action: 'refuse' });
    else await vm.setUnreadable(3016);
    const failed = await harness.capture(vmId);
    expect(failed.status).toBe('aborted');
    expect(failed.vmRunning).toBe(true);
    await vm.clearFaults();
    await vm.setUnreadable(3016, false);

    await vm.run({ pages: { firstPage: 4000, pageCount: 16 }, value: 4 });
    const atS2 = await allHashes(vm);
    const s2 = await harness.published(vmId);
    expect(s2.predecessor).toBe(s1.layer);
    expect(s2.epoch).toBe(s1.epoch + 1);

    await using first = await harness.restore(s1.snapshotId, { dialect });
    expect(firstDifference(await allHashes(first), atS1)).toBeNull();
    await using second = await harness.restore(s2.snapshotId, { dialect });
    expect(firstDifference(await allHashes(second), atS2)).toBeNull();
    expect(harness.warnings).toEqual([]);
  });
});

test('all dialects give the same bytes of the same guest', async () => {
  await using harness = await Harness.make();
  const restored: BigUint64Array[] = [];
  for (const dialect of dialects) {
    await using vm = await harness.vm({ dialect, memoryMib: 32 });
    const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
    await vm.run({ pages: { seed: 7, count: 700, firstPage: 512 }, value: 9 });
    await vm.deviceWrites({ pages: { pages: [4000, 5000] }, value: 4 });
    await harness.published(vmId);
    // Of what a device writes after the first capture, only the VMM's own bitmap tells.
    await vm.deviceWrites({ pages: { pages: [5000, 5001, 7000] }, value: 5 });
    const made = await harness.published(vmId);
    await using copy = await harness.restore(made.snapshotId, { dialect });
    restored.push((await copy.hashes(512, 7680)).slice());
  }
  expect(
    firstDifference(restored[0] ?? new BigUint64Array(), restored[1] ?? new BigUint64Array()),
  ).toBeNull();
  expect(
    firstDifference(restored[0] ?? new BigUint64Array(), restored[2] ?? new BigUint64Array()),
  ).toBeNull();
});

test('in mode dirty a guest that reads much and writes little makes a layer of what it wrote', async () => {
  await using harness = await Harness.make();
  await using vm = await harness.vm({ dialect: 'e2b', memoryMib: 256 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  await harness.published(vmId);
  await vm.run({ pages: { firstPage: 1024, pageCount: 50_000 }, fill: 'read' });
  await vm.run({ pages: { seed: 3, count: 100, firstPage: 2048 }, value: 8 });
  const made = await harness.published(vmId);
  const mailboxAndCounters = 8;
  expect(made.dataBytes / 4096).toBeGreaterThanOrEqual(100);
  expect(made.dataBytes / 4096).toBeLessThanOrEqual(100 + mailboxAndCounters);
});

test('five generations in new processes each hold the marks of all before', async () => {
  await using harness = await Harness.make();
  let snapshot: string | undefined;
  let expected: BigUint64Array = new BigUint64Array();
  for (let generation = 0; generation < 5; generation++) {
    await using vm =
      snapshot === undefined
        ? await harness.vm({ dialect: 'aenv', memoryMib: 32 })
        : await harness.restore(snapshot, { dialect: 'aenv' });
    if (snapshot !== undefined) {
      expect(firstDifference(await allHashes(vm), expected)).toBeNull();
      await vm.resume();
    }
    const attached = await harness.attach(vm, {
      trackingMode: 'dirty',
      ...(snapshot === undefined ? {} : { launchParent: snapshot }),
    });
    await vm.run({
      pages: { firstPage: 2000 + generation * 10, pageCount: 10 },
      value: generation + 1,
    });
    expected = await allHashes(vm);
    const made = await harness.published(attached.vmId);
    expect(made.chainDepth).toBe(generation + 1);
    snapshot = made.snapshotId;
  }
});

test('zero pages over a parent read zero after restore, and a base stores none', async () => {
  await using harness = await Harness.make();
  await using vm = await harness.vm({ dialect: 'e2b', memoryMib: 32 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  await vm.run({ pages: { firstPage: 2000, pageCount: 100 }, value: 4 });
  await vm.run({ pages: { firstPage: 4000, pageCount: 100 }, fill: 'zero' });
  const base = await harness.published(vmId);
  expect(base.zeroedBytes).toBe(0);
  expect(base.dataBytes / 4096).toBeLessThan(110);
  await vm.run({ pages: { firstPage: 2050, pageCount: 50 }, fill: 'zero' });
  const expected = await allHashes(vm);
  const made = await harness.published(vmId);
  expect(made.zeroedBytes).toBe(50 * 4096);
  await using copy = await harness.restore(made.snapshotId, { dialect: 'e2b' });
  expect(firstDifference(await allHashes(copy), expected)).toBeNull();
});

test('a VMM with epochs of its own names only what was written since the last capture, also after a failed one', async () => {
  await using harness = await Harness.make();
  await using vm = await harness.vm({ dialect: 'e2b', memoryMib: 32, dirtyEpochs: true });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  await vm.run({ pages: { firstPage: 2000, pageCount: 300 }, value: 1 });
  await harness.published(vmId);
  await vm.run({ pages: { firstPage: 3000, pageCount: 20 }, value: 2 });
  await vm.setUnreadable(3010);
  expect((await harness.capture(vmId)).failure?.kind).toBe('unreadable-page');
  await vm.setUnreadable(3010, false);
  await vm.run({ pages: { firstPage: 3500, pageCount: 5 }, value: 4 });
  // The VMM's epoch has begun then, and its set is nowhere else.
  await vm.fault({ on: 'dirty', action: 'refuse' });
  expect((await harness.capture(vmId)).failure?.kind).toBe('vmm-refused');
  await vm.run({ pages: { firstPage: 4000, pageCount: 10 }, value: 3 });
  const expected = await allHashes(vm);
  const made = await harness.published(vmId);
  expect(made.selection).toBe('epoch');
  expect(made.selectedPages).toBe(35);
  await using copy = await harness.restore(made.snapshotId, { dialect: 'e2b' });
  expect(firstDifference(await allHashes(copy), expected)).toBeNull();
});

test.each(['detached and attached again', 'captured by another daemon before'])(
  'what a VMM with epochs of its own has forgotten is captured all the same: %s',
  async (how) => {
    await using harness = await Harness.make();
    await using other = await Harness.make({}, {}, { socketRoot: harness.folder });
    await using vm = await harness.vm({ dialect: 'e2b', memoryMib: 32, dirtyEpochs: true });
    const first = how.startsWith('detached') ? harness : other;
    const before = await first.attach(vm, { trackingMode: 'dirty' });
    await vm.run({ pages: { firstPage: 2000, pageCount: 64 }, value: 1 });
    await first.published(before.vmId);
    valueOf(await first.service.detach(before.vmId));
    const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
    await vm.run({ pages: { firstPage: 3000, pageCount: 8 }, value: 2 });
    const expected = await allHashes(vm);
    const made = await harness.published(vmId);
    expect(made.selection).toBe('widened');
    await using copy = await harness.restore(made.snapshotId, { dialect: 'e2b' });
    expect(firstDifference(await allHashes(copy), expected)).toBeNull();
  },
);

test.each(dialects)(
  'dialect %s: pages that are read along never hide what is there',
  async (dialect) => {
    const batches = { batch_bytes: '1MiB', join_gap_pages: 4 };
    await using harness = await Harness.make({ pipeline: { coalesce: batches } });
    await using vm = await harness.vm({ dialect, memoryMib: 32 });
    await vm.run({ pages: { firstPage: 2000, pageCount: 64 }, value: 1 });
    const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
    await harness.published(vmId);
    for (const removed of [[], [2021]]) {
      await vm.run({ pages: { pages: [2010, 2012, 2020, 2022] }, value: 2 });
      for (const firstPage of removed) await vm.removePages({ firstPage, pageCount: 1 });
      const made = await harness.published(vmId);
      // Only now: reading a removed page brings a page of zeroes back.
      const expected = await allHashes(vm);
      await using copy = await harness.restore(made.snapshotId, { dialect });
      expect(firstDifference(await allHashes(copy), expected)).toBeNull();
    }
  },
);

test('a VM that its owner pauses while the capture is prepared stays paused', async () => {
  await using harness = await Harness.make();
  await using vm = await harness.vm({ dialect: 'e2b', memoryMib: 16 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  const enter = Reflect.get<Engine, 'enter'>(Engine.prototype, 'enter');
  vi.spyOn(Engine.prototype, 'enter').mockImplementation(async function (
    this: Engine,
    ...asked: Parameters<Engine['enter']>
  ) {
    const place = await enter.apply(this, asked);
    if (asked[0] === 'pause') await vm.pause();
    return place;
  });
  const made = await harness.published(vmId);
  expect(made.frozenMs).toBe(0);
  expect((await vm.info()).state).toBe('Paused');
});

test('a capture that fails while it copies leaves its set in the ledger', async () => {
  await using harness = await Harness.make();
  await using vm = await harness.vm({ dialect: 'e2b', memoryMib: 16 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  await vm.run({ pages: { firstPage: 2000, pageCount: 10 }, value: 1 });
  await vm.setUnreadable(2005);
  const { nodeDb } = harness;
  const record = nodeDb.recordSetAsync.bind(nodeDb);
  const resume = vi.spyOn(VmmClient.prototype, 'resume');
  const abort = vi.spyOn(nodeDb, 'abort');
  vi.spyOn(nodeDb, 'recordSetAsync').mockImplementationOnce(async (...call) => {
    // Slower than the failure, which lets the VM run first: the abort has to wait for this.
    while (resume.mock.settledResults.every(({ type }) => type !== 'fulfilled')) await turn();
    for (let i = 0; i < 5_000 && abort.mock.calls.length === 0; i++) await turn();
    return record(...call);
  });
  const failed = await harness.capture(vmId, { resumeAfter: 'copy' });
  expect(failed.failure?.kind).toBe('unreadable-page');
  const { bits } = harness.nodeDb.ledger(vmId)?.selected ?? { bits: new Uint8Array() };
  for (let page = 2000; page < 2010; page++) {
    expect(((bits[page >> 3] ?? 0) >> (page & 7)) & 1, String(page)).toBe(1);
  }
});

test('that a VM is paused by us is durable before the pause is sent', async () => {
  await using harness = await Harness.make();
  await using vm = await harness.vm({ dialect: 'aenv', memoryMib: 16 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  const real = Object.getOwnPropertyDescriptor(VmmClient.prototype, 'pause')
    ?.value as VmmClient['pause'];
  const pausedBy: (string | null | undefined)[] = [];
  vi.spyOn(VmmClient.prototype, 'pause').mockImplementation(function (this: VmmClient, ...call) {
    pausedBy.push(harness.nodeDb.getVm(vmId)?.pausedBy);
    return real.apply(this, call);
  });
  const made = await harness.capture(vmId);
  expect(pausedBy).toEqual([made.captureId]);
  expect(harness.nodeDb.getVm(vmId)?.pausedBy).toBeNull();
});

test('no layer is sealed before its set is in the ledger', async () => {
  await using harness = await Harness.make();
  await using vm = await harness.vm({ dialect: 'aenv', memoryMib: 16 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  await vm.run({ pages: { firstPage: 2000, pageCount: 10 }, value: 1 });
  const { nodeDb } = harness;
  const record = nodeDb.recordSetAsync.bind(nodeDb);
  const append = vi.spyOn(LayerWriter.prototype, 'append');
  const seal = vi.spyOn(LayerWriter.prototype, 'seal');
  let sealedEarly = false;
  vi.spyOn(nodeDb, 'recordSetAsync').mockImplementationOnce(async (...call) => {
    while (append.mock.settledResults.every(({ type }) => type !== 'fulfilled')) await turn();
    // Everything is in the file: a seal that waits for nothing comes within a few turns.
    for (let i = 0; i < 100; i++) await turn();
    sealedEarly = seal.mock.calls.length > 0;
    return record(...call);
  });
  await harness.published(vmId);
  expect(sealedEarly).toBe(false);
  expect(seal).toHaveBeenCalledOnce();
});

test('a long chain is compacted outside the pause, stays within max_chain, and restores exactly', async () => {
  await using harness = await Harness.make({ lineage: { max_chain: 4 } });
  await using vm = await harness.vm({ dialect: 'aenv', memoryMib: 16 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  let expected: BigUint64Array = new BigUint64Array();
  let last = '';
  for (let epoch = 0; epoch < 9; epoch++) {
    const pages = { seed: epoch, count: 40, firstPage: 1024, spanPages: 400 };
    await vm.run({ pages, value: epoch + 1 });
    expected = await allHashes(vm);
    last = (await harness.published(vmId)).snapshotId;
    expect(harness.service.getVm(vmId)?.chainDepth).toBeLessThanOrEqual(4);
  }
  await using copy = await harness.restore(last);
  expect(firstDifference(await allHashes(copy), expected)).toBeNull();
  expect(harness.warnings).toEqual([]);
});
