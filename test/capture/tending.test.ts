/** VMs whose VMM fails for a while: they are taken up again without another start of the daemon. */
import { join } from 'node:path';
import { afterEach, expect, test, vi } from 'vitest';
import { systemClock } from '../../src/clock.ts';
import { NodeDb } from '../../src/lineage/node-db.ts';
import type { MiniVm } from '../../src/minivm/launch.ts';
import { err } from '../../src/result.ts';
import { captureId, type VmId } from '../../src/units.ts';
import { keeping } from '../lineage/fixtures.ts';
import { allHashes, firstDifference, Harness, valueOf, until } from './harness.ts';

/** Resumes that the VMM has answered, whatever it said. */
const resumes = async (vm: MiniVm): Promise<number> =>
  (await vm.requests()).filter((each) => each.operation === 'resume' && each.status > 0).length;

const full = err({ kind: 'node-db-io' as const, message: 'no space' });

afterEach(() => vi.restoreAllMocks());

/** As a daemon leaves it that was killed with the VM paused. */
function leavePaused(harness: Harness, vmId: VmId): void {
  using db = valueOf(NodeDb.open(join(harness.config.paths.state, 'node.db'), systemClock));
  const id = captureId('killed');
  valueOf(db.createJob({ captureId: id, vmId, requestJson: '{}', createdAtMs: 1 }));
  valueOf(db.begin(vmId, id, keeping));
  valueOf(db.markPaused(vmId, id));
}

async function expectNextComplete(harness: Harness, vm: MiniVm, vmId: VmId): Promise<void> {
  await vm.run({ pages: { firstPage: 1700, pageCount: 3 }, value: 9 });
  const expected = await allHashes(vm);
  const made = await harness.published(vmId);
  await using copy = await harness.restore(made.snapshotId);
  expect(firstDifference(await allHashes(copy), expected)).toBeNull();
}

test('a VMM that refuses every resume of a capture is resumed later, and captured again', async () => {
  await using harness = await Harness.make();
  await using vm = await harness.vm({ memoryMib: 16 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  await vm.fault({ on: 'resume', action: 'refuse', times: 0 });
  const view = await harness.capture(vmId, { resumeAfter: 'commit' });
  expect(view.vmRunning).toBe(false);
  expect(harness.pausedNow).toEqual(new Set([vmId]));
  const refused = await harness.service.startCapture(vmId, {});
  expect(refused.ok ? '' : refused.error.kind).toBe('capture-running');
  // A try of the tending's own, refused too, changes nothing.
  const before = await resumes(vm);
  await until(async () => (await resumes(vm)) > before);
  await new Promise((resolve) => setImmediate(resolve));
  expect(harness.service.getVm(vmId)?.pausedByUs).toBe(true);
  expect(harness.pausedNow).toEqual(new Set([vmId]));
  await vm.clearFaults();
  await until(() => harness.service.getVm(vmId)?.pausedByUs === false);
  expect((await vm.info()).state).toBe('Running');
  expect(harness.pausedNow.size).toBe(0);
  await expectNextComplete(harness, vm, vmId);
});

test('a resume that cannot be recorded is not sent again', async () => {
  await using harness = await Harness.make();
  await using vm = await harness.vm({ memoryMib: 16 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  await vm.fault({ on: 'resume', action: 'refuse', times: 0 });
  await harness.capture(vmId, { resumeAfter: 'commit' });
  const clear = vi.spyOn(harness.nodeDb, 'clearPaused');
  clear.mockReturnValueOnce(full).mockReturnValueOnce(full);
  await vm.clearFaults();
  await until(() => clear.mock.results.length > 0);
  // Its owner may stop it again before node.db can be written.
  await vm.pause();
  await until(() => harness.service.getVm(vmId)?.pausedByUs === false);
  expect(clear.mock.results).toHaveLength(3);
  expect((await vm.info()).state).toBe('Paused');
});

test('a VM that would not run does not wait for a node.db that cannot be written', async () => {
  await using harness = await Harness.make();
  await using vm = await harness.vm({ memoryMib: 16 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  const abort = vi.spyOn(harness.nodeDb, 'abort').mockReturnValue(full);
  await vm.fault({ on: 'resume', action: 'refuse', times: 0 });
  await vm.fault({ on: 'snapshot-create', action: 'refuse' });
  expect((await harness.capture(vmId)).status).toBe('aborted');
  expect((await vm.info()).state).toBe('Paused');
  await vm.clearFaults();
  await until(async () => (await vm.info()).state === 'Running');
  expect(abort.mock.results.every(({ value }) => value === full)).toBe(true);
  abort.mockRestore();
  await expectNextComplete(harness, vm, vmId);
});

test('a node.db without space for what an earlier life had under way keeps nobody from starting', async () => {
  await using harness = await Harness.make();
  await using vm = await harness.vm({ memoryMib: 16 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  await harness.published(vmId);
  await harness.stop();
  leavePaused(harness, vmId);
  await vm.pause();
  vi.spyOn(NodeDb.prototype, 'endEarlierNeeds').mockReturnValue(full);
  await harness.start();
  expect((await vm.info()).state).toBe('Running');
  expect(harness.warnings.some(({ facts }) => facts['action'] === 'end-needs')).toBe(true);
});

test('a VMM that does not answer at the start is found again, and resumed', async () => {
  await using harness = await Harness.make();
  await using vm = await harness.vm({ memoryMib: 16 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  await harness.published(vmId);
  await harness.stop();
  leavePaused(harness, vmId);
  await vm.pause();
  await vm.fault({ on: 'describe', action: 'refuse', times: 0 });
  await harness.start();
  expect(harness.service.getVm(vmId)).toMatchObject({ state: 'unreachable', pausedByUs: true });
  const refused = await harness.service.startCapture(vmId, {});
  expect(refused.ok ? '' : refused.error.kind).toBe('vmm-unreachable');
  expect((await vm.info()).state).toBe('Paused');
  await vm.clearFaults();
  await until(() => harness.service.getVm(vmId)?.pausedByUs === false);
  expect((await vm.info()).state).toBe('Running');
  expect(harness.service.getVm(vmId)?.state).toBe('attached');
  await expectNextComplete(harness, vm, vmId);
});

test('a VM that ends while it is tried again is let go of', async () => {
  await using harness = await Harness.make();
  await using vm = await harness.vm({ memoryMib: 16 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  await vm.fault({ on: 'resume', action: 'refuse', times: 0 });
  await harness.capture(vmId, { resumeAfter: 'commit' });
  expect(harness.service.getVm(vmId)?.pausedByUs).toBe(true);
  await vm.kill();
  await until(() => harness.service.getVm(vmId)?.pausedByUs === false);
  expect(harness.service.getVm(vmId)?.state).toBe('gone');
  expect(harness.pausedNow.size).toBe(0);
  expect((await harness.service.detach(vmId)).ok).toBe(true);
});
