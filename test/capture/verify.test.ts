/** Verifying captures on real small VMs: what a dirty set did not name is found, stored and marked. */
import { join } from 'node:path';
import { describe, expect, test } from 'vitest';
import type { CaptureObserver } from '../../src/capture/observer.ts';
import type { VerifyReport } from '../../src/capture/verify.ts';
import { SuspectFlusher } from '../../src/catalog/suspect-queue.ts';
import { systemClock } from '../../src/clock.ts';
import type { MiniVm } from '../../src/minivm/launch.ts';
import { snapshotId, type VmId } from '../../src/units.ts';
import { allBytes, firstDifferingPage, Harness, never, until, valueOf } from './harness.ts';

/** Marks what is queued, as a daemon does in the background. */
async function marked(harness: Harness): Promise<void> {
  await using flusher = new SuspectFlusher({
    catalog: harness.catalog,
    store: harness.nodeDb,
    clock: systemClock,
    onError: (error) => expect.fail(error.message),
  });
  expect(await flusher.flush()).toBe(true);
}

const suspectOf = async (harness: Harness, id: string): Promise<string | null> =>
  valueOf(await harness.catalog.show(id)).suspectReason;

async function write(vm: MiniVm, value: number): Promise<void> {
  await vm.run({ pages: { firstPage: 1600 + value * 16, pageCount: 10 }, value });
  await vm.deviceWrites({ pages: { firstPage: 3000 + value * 16, pageCount: 7 }, value });
}

/** Three captures; somebody else has ended an epoch of the VMM before the second. */
async function missed(harness: Harness, vm: MiniVm, vmId: VmId): Promise<readonly string[]> {
  await write(vm, 1);
  const base = await harness.published(vmId);
  await write(vm, 2);
  await vm.epoch('begin');
  await vm.epoch('commit');
  const second = await harness.published(vmId);
  const third = await harness.published(vmId);
  return [base, second, third].map((made) => made.snapshotId);
}

describe('a set that somebody else has cleared', () => {
  const options = { dialect: 'aenv', dirtyEpochs: true, memoryMib: 16 } as const;

  test('is found out: the pages are stored, and the snapshots since are suspect', async () => {
    const reports: VerifyReport[] = [];
    const observer: Partial<CaptureObserver> = { verified: (_of, report) => reports.push(report) };
    await using harness = await Harness.make({}, observer);
    await using vm = await harness.vm(options);
    const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
    const before = await missed(harness, vm, vmId);
    const expected = await allBytes(vm);
    expect(firstDifferingPage(await harness.memoryOf(before[2] ?? ''), expected)).toBe(1632);

    const verified = await harness.published(vmId, { verify: true });
    expect(verified.verify).toMatchObject({
      compared: 'all',
      differing: 17,
      ranges: [
        { imageOffset: 1632 * 4096, length: 10 * 4096 },
        { imageOffset: 3032 * 4096, length: 7 * 4096 },
      ],
    });
    expect(reports).toEqual([verified.verify]);
    expect(firstDifferingPage(await harness.memoryOf(verified.snapshotId), expected)).toBeNull();

    await marked(harness);
    for (const id of before) {
      expect(await suspectOf(harness, id)).toMatch(/17 pages that its layers had lost/);
      await expect(harness.memoryOf(id)).rejects.toMatchObject({
        detail: { kind: 'snapshot-suspect' },
      });
    }
    expect(await suspectOf(harness, verified.snapshotId)).toBeNull();

    // Its word is not taken any more; then it is again.
    const next = await harness.published(vmId);
    expect(next.selection).toBe('widened');
    expect(next.selectionReason).toMatch(/17 pages/);
    const after = await harness.published(vmId, { verify: true });
    expect(after).toMatchObject({ selection: 'epoch', verify: { compared: 'all', differing: 0 } });
    for (const made of [next, after]) {
      expect(await suspectOf(harness, made.snapshotId)).toBeNull();
    }
  });

  test('is found out when the catalog hears of it in the next process of the daemon, too', async () => {
    await using harness = await Harness.make();
    await using vm = await harness.vm(options);
    const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
    const before = await missed(harness, vm, vmId);
    valueOf(harness.nodeDb.pagesLost(vmId, 'as a test says'));
    expect(harness.nodeDb.pendingSuspects(10)).toHaveLength(3);
    await harness.stop();
    await harness.start();
    await marked(harness);
    expect(await suspectOf(harness, before[0] ?? '')).toBe('as a test says');
    expect(harness.nodeDb.countSuspects()).toBe(0);
    valueOf(await harness.catalog.setSuspect(snapshotId(before[0] ?? ''), null));
    expect(await suspectOf(harness, before[0] ?? '')).toBeNull();
  });

  test('is found out by the verification that comes after every second capture', async () => {
    const found: VerifyReport[] = [];
    await using harness = await Harness.make(
      { capture: { verify: { every: 2 } } },
      { verified: (_of, report) => found.push(report) },
    );
    await using vm = await harness.vm(options);
    const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
    await write(vm, 1);
    await harness.published(vmId);
    await write(vm, 2);
    const second = await harness.published(vmId);
    await until(() => harness.service.listCaptures(vmId).length === 3);
    const [started] = harness.service.listCaptures(vmId);
    if (started === undefined) throw new Error('it has just been seen');
    const clean = await harness.service.waitFor(started.captureId, never);
    expect(found).toEqual([clean.result?.verify]);
    expect(clean.result?.verify).toMatchObject({ compared: 'all', differing: 0 });
    // Nobody asked for its snapshot.
    const made = valueOf(await harness.catalog.show(clean.result?.snapshotId ?? ''));
    expect(made.state).toBe('retired');
    expect(await suspectOf(harness, second.snapshotId)).toBeNull();
  });
});

test.each([
  ['firecracker', 'dirty'],
  ['firecracker', 'mincore'],
  ['aenv', 'dirty'],
  ['aenv', 'mincore'],
  ['e2b', 'dirty'],
  ['e2b', 'mincore'],
] as const)('an honest VM of dialect %s in mode %s is found to be right', async (dialect, mode) => {
  await using harness = await Harness.make();
  await using vm = await harness.vm({ dialect, memoryMib: 16 });
  const { vmId } = await harness.attach(vm, { trackingMode: mode });
  await write(vm, 1);
  const base = await harness.published(vmId, { verify: true });
  expect(base.verify).toEqual({ compared: 'nothing', reason: 'there is no memory parent yet' });
  await write(vm, 2);
  await harness.published(vmId);
  await vm.removePages({ firstPage: 1616, pageCount: 6 });
  await write(vm, 3);
  const made = await harness.published(vmId, { verify: true });
  expect(made.verify).toMatchObject({ compared: 'all', differing: 0, ranges: [] });
  expect(
    firstDifferingPage(await harness.memoryOf(made.snapshotId), await allBytes(vm)),
  ).toBeNull();
});

test('a snapshot that somebody else makes between two captures is found out', async () => {
  await using harness = await Harness.make();
  await using vm = await harness.vm({ dialect: 'firecracker', memoryMib: 16 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  await write(vm, 1);
  await harness.published(vmId);
  await write(vm, 2);
  await vm.pause();
  await vm.createSnapshot({
    type: 'Diff',
    snapshotPath: join(harness.folder, 'foreign-state'),
    memFilePath: join(harness.folder, 'foreign-memory'),
  });
  await vm.resume();
  await write(vm, 3);
  const made = await harness.published(vmId, { verify: true });
  expect(made.verify).toMatchObject({ compared: 'all', differing: 17 });
  expect(
    firstDifferingPage(await harness.memoryOf(made.snapshotId), await allBytes(vm)),
  ).toBeNull();
});
