import { rmSync } from 'node:fs';
import { join } from 'node:path';
import { afterEach, describe, expect, test, vi } from 'vitest';
import type { MiniVm } from '../../src/minivm/launch.ts';
import { VmmClient } from '../../src/vmm/client.ts';
import { LayerWriter } from '../../src/layer/layer-writer.ts';
import { allHashes, firstDifference, Harness, never } from './harness.ts';

afterEach(() => vi.restoreAllMocks());

/** Pauses and resumes that the VMM has answered. */
async function pausesAndResumes(vm: MiniVm): Promise<{ pauses: number; resumes: number }> {
  const log = await vm.requests();
  const count = (operation: string): number =>
    log.filter((entry) => entry.operation === operation && entry.status < 300).length;
  return { pauses: count('pause'), resumes: count('resume') };
}

/** Runs `act` when the first batch of a capture is to be appended, and that batch waits for it. */
function atFirstAppend(act: () => Promise<void>): void {
  const append = Object.getOwnPropertyDescriptor(LayerWriter.prototype, 'append')
    ?.value as LayerWriter['append'];
  vi.spyOn(LayerWriter.prototype, 'append').mockImplementationOnce(async function (
    this: LayerWriter,
    batch,
  ) {
    await act();
    return append.call(this, batch);
  });
}

/** More than the slabs hold: the last of it is not read before the first is appended. */
const moreThanSlabs = { pages: { firstPage: 1024, pageCount: 20_000 }, value: 5, words: 2 };

/** The next capture is complete: it restores to what the VM holds now. */
async function expectNextComplete(harness: Harness, vm: MiniVm, vmId: never): Promise<void> {
  await vm.run({ pages: { firstPage: 1500, pageCount: 3 }, value: 77 });
  const expected = await allHashes(vm);
  const made = await harness.published(vmId);
  await using copy = await harness.restore(made.snapshotId);
  expect(firstDifference(await allHashes(copy), expected)).toBeNull();
}

describe('a VMM that', () => {
  const cases = [
    { on: 'pause', skip: 0, action: 'refuse', kind: 'vmm-refused', resumes: 0 },
    // The layout is asked for before the pause, by the first of these requests; the set by the
    // second.
    { on: 'dirty', skip: 0, action: 'refuse', kind: 'vmm-refused', resumes: 0 },
    { on: 'dirty', skip: 1, action: 'refuse', kind: 'vmm-refused', resumes: 1 },
    { on: 'dirty', skip: 1, action: 'garbage', kind: 'vmm-bad-answer', resumes: 1 },
    { on: 'snapshot-create', skip: 0, action: 'refuse', kind: 'vmm-refused', resumes: 1 },
  ] as const;
  test.each(cases)('$action at $on (after $skip) fails the capture with $kind', async (c) => {
    await using harness = await Harness.make();
    await using vm = await harness.vm({ dialect: 'aenv', memoryMib: 32 });
    const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
    await vm.run({ pages: { firstPage: 1000, pageCount: 200 }, value: 5 });
    await harness.published(vmId);
    await vm.run({ pages: { firstPage: 1100, pageCount: 20 }, value: 6 });
    await vm.clearRequests();
    await vm.fault({ on: c.on, action: c.action, skip: c.skip });
    const failed = await harness.capture(vmId, { resumeAfter: 'copy' });
    await vm.clearFaults();
    expect(failed.status).toBe('aborted');
    expect(failed.failure?.kind).toBe(c.kind);
    expect((await pausesAndResumes(vm)).resumes).toBe(c.resumes);
    expect((await vm.info()).state).toBe('Running');
    expect(harness.pausedNow.size).toBe(0);
    const left = await harness.leftovers();
    expect(left.layers).toHaveLength(1);
    expect(left.staging).toEqual([]);
    await expectNextComplete(harness, vm, vmId as never);
  });

  test('hangs at the dirty set is cut off by the pause deadline, and runs again', async () => {
    await using harness = await Harness.make();
    await using vm = await harness.vm({ dialect: 'aenv', memoryMib: 32 });
    const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
    await vm.fault({ on: 'dirty', action: 'hang', skip: 1 });
    const failed = await harness.capture(vmId, { pauseDeadlineMs: 200 });
    await vm.clearFaults();
    expect(failed.failure?.kind).toBe('pause-deadline');
    expect(failed.vmRunning).toBe(true);
    await expectNextComplete(harness, vm, vmId as never);
  });
});

test('a page that cannot be read fails the capture with its address, never with zeros', async () => {
  await using harness = await Harness.make();
  await using vm = await harness.vm({ dialect: 'e2b', memoryMib: 32 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  await vm.run({ pages: { firstPage: 1000, pageCount: 300 }, value: 5 });
  const page = 1234;
  await vm.setUnreadable(page);
  const failed = await harness.capture(vmId);
  const host = BigInt((await vm.info()).regions[0]?.hostAddress ?? '0') + BigInt(page) * 4096n;
  expect(failed.failure?.kind).toBe('unreadable-page');
  expect(failed.failure?.message).toContain(`0x${host.toString(16)}`);
  expect(failed.vmRunning).toBe(true);
  expect(await harness.leftovers()).toEqual({ layers: [], staging: [] });
  await vm.setUnreadable(page, false);
  await expectNextComplete(harness, vm, vmId as never);
});

test('a VMM that dies in the middle of a capture fails it as vm-exited', async () => {
  await using harness = await Harness.make();
  await using vm = await harness.vm({ dialect: 'aenv', memoryMib: 128 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  await vm.run(moreThanSlabs);
  atFirstAppend(async () => void (await vm.kill()));
  const view = await harness.capture(vmId);
  expect(view.status).toBe('aborted');
  expect(view.failure?.kind).toBe('vm-exited');
  expect(await harness.leftovers()).toEqual({ layers: [], staging: [] });
  expect(harness.pausedNow.size).toBe(0);
});

test('a VM state that is gone by the commit aborts the capture, and the next is complete', async () => {
  let strike = true;
  await using harness: Harness = await Harness.make(
    {},
    {
      stage: (capture, stage, state) => {
        if (!strike || stage !== 'dirty-bitmap' || state !== 'ended') return;
        strike = false;
        rmSync(join(harness.config.paths.staging, capture.captureId, 'vmm', 'vm-state'));
      },
    },
  );
  await using vm = await harness.vm({ dialect: 'aenv', memoryMib: 16 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  const failed = await harness.capture(vmId);
  expect(failed.status).toBe('aborted');
  expect(failed.failure?.kind).toBe('vmm-file-bad');
  expect(failed.failure?.message).toContain('vm-state');
  expect(failed.vmRunning).toBe(true);
  expect(await harness.leftovers()).toEqual({ layers: [], staging: [] });
  await expectNextComplete(harness, vm, vmId as never);
});

test('a capture cancelled while it reads leaves nothing, and the next has its pages', async () => {
  await using harness = await Harness.make();
  await using vm = await harness.vm({ dialect: 'aenv', memoryMib: 128 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  await vm.run(moreThanSlabs);
  let cancelled: ReturnType<typeof harness.service.cancelCapture> | undefined;
  const reads = new Promise<void>((resolve) => {
    atFirstAppend(async () => {
      await Promise.resolve();
      // Answers when the capture has ended, which this append is part of.
      cancelled = harness.service.cancelCapture(started.captureId);
      resolve();
    });
  });
  const started = await harness.startCapture(vmId);
  await reads;
  const answer = await cancelled;
  expect(answer?.ok && answer.value.failure?.kind).toBe('cancelled');
  expect((await vm.info()).state).toBe('Running');
  expect(await harness.leftovers()).toEqual({ layers: [], staging: [] });
  await expectNextComplete(harness, vm, vmId as never);
});

test('of two captures of one VM, one runs and the other is refused with its id', async () => {
  await using harness = await Harness.make();
  await using vm = await harness.vm({ dialect: 'aenv', memoryMib: 64 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  await vm.fault({ on: 'dirty', action: 'delay', afterMs: 50 });
  const answers = await Promise.all(
    Array.from({ length: 10 }, () => harness.service.startCapture(vmId, {})),
  );
  const started = answers.filter((answer) => answer.ok);
  expect(started).toHaveLength(1);
  const running = started[0]?.ok === true ? started[0].value.captureId : undefined;
  for (const answer of answers) {
    if (answer.ok) continue;
    expect(answer.error.kind).toBe('capture-running');
    expect(answer.error.facts).toEqual({ runningCaptureId: running });
  }
  const view = await harness.service.waitFor(running as never, never);
  expect(view.failure).toBeNull();
  expect(view.status).toBe('published');
  expect(await pausesAndResumes(vm)).toEqual({ pauses: 1, resumes: 1 });
});

test.each([false, true])(
  'a VM that its owner paused stays paused (capture fails: %s)',
  async (fails) => {
    await using harness = await Harness.make();
    await using vm = await harness.vm({ dialect: 'aenv', memoryMib: 32 });
    const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
    await vm.pause();
    await vm.clearRequests();
    if (fails) await vm.fault({ on: 'dirty', action: 'refuse' });
    const view = await harness.capture(vmId);
    expect(view.failure === null).toBe(!fails);
    expect(view.status).toBe(fails ? 'aborted' : 'published');
    expect((await vm.info()).state).toBe('Paused');
    expect(await pausesAndResumes(vm)).toEqual({ pauses: 0, resumes: 0 });
  },
);

test.each(['publish', 'commit', 'copy'] as const)(
  'resume after %s: the snapshot is the guest as it was paused, which went on writing before and after',
  async (resumeAfter) => {
    await using harness = await Harness.make();
    await using vm = await harness.vm({ dialect: 'e2b', memoryMib: 16 });
    const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
    const hot = { seed: 5, count: 1_500, firstPage: 1024 };
    await vm.run({ pages: hot, value: 5, words: 16 });
    await vm.program({ pages: hot, value: 6, loop: true, pagesPerSecond: 10_000 });
    await vm.clearRequests();
    const resume = Object.getOwnPropertyDescriptor(VmmClient.prototype, 'resume')
      ?.value as VmmClient['resume'];
    const atResume: BigUint64Array[] = [];
    const spy = vi.spyOn(VmmClient.prototype, 'resume');
    spy.mockImplementation(async function (this: VmmClient, ...call) {
      atResume.push((await allHashes(vm)).slice());
      return resume.apply(this, call);
    });
    const made = await harness.published(vmId, { resumeAfter });
    spy.mockRestore();
    expect(made.resumeAfter).toBe(resumeAfter);
    expect(await pausesAndResumes(vm)).toEqual({ pauses: 1, resumes: 1 });
    await using copy = await harness.restore(made.snapshotId, { dialect: 'e2b' });
    const [expected = new BigUint64Array()] = atResume;
    expect(firstDifference(await allHashes(copy), expected)).toBeNull();
  },
);
