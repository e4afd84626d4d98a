/** Requests that a VMM answers with an error, with nonsense or not at all, and has carried out. */
import { describe, expect, test } from 'vitest';
import type { FaultBody } from '../../src/minivm/control-schema.ts';
import type { MiniVm } from '../../src/minivm/launch.ts';
import type { VmId } from '../../src/units.ts';
import { allBytes, firstDifferingPage, Harness, until, valueOf } from './harness.ts';

const impatient = { vmm: { request_timeout: '300ms', snapshot_timeout: '1s' } };

/** Requests of an operation that came in, answered or not. */
const sent = async (vm: MiniVm, operation: string): Promise<number> =>
  (await vm.requests()).filter((each) => each.operation === operation).length;

async function expectNextComplete(harness: Harness, vm: MiniVm, vmId: VmId): Promise<void> {
  await vm.run({ pages: { firstPage: 1700, pageCount: 3 }, value: 9 });
  const expected = await allBytes(vm);
  const { snapshotId } = await harness.published(vmId);
  expect(firstDifferingPage(await harness.memoryOf(snapshotId), expected)).toBeNull();
}

const done = { when: 'done' } as const;

describe('a pause that has happened, and', () => {
  test.each([
    { action: 'refuse', kind: 'vmm-refused' },
    { action: 'hang', kind: 'vmm-timeout' },
  ] as const)('whose answer is: $action, is undone', async ({ action, kind }) => {
    await using harness = await Harness.make(impatient);
    await using vm = await harness.vm({ dialect: 'aenv', memoryMib: 16 });
    const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
    await vm.fault({ on: 'pause', action, ...done });
    await vm.clearRequests();
    const view = await harness.capture(vmId);
    expect(view.failure?.kind).toBe(kind);
    expect(await sent(vm, 'resume')).toBe(1);
    expect((await vm.info()).state).toBe('Running');
    expect(harness.service.getVm(vmId)?.pausedByUs).toBe(false);
    expect(harness.pausedNow.size).toBe(0);
    await vm.clearFaults();
    await expectNextComplete(harness, vm, vmId);
  });
});

describe('a resume that has happened, and', () => {
  const faults: readonly FaultBody[] = [
    { on: 'resume', action: 'refuse', times: 0, ...done },
    { on: 'resume', action: 'hang', times: 0, ...done },
  ];
  test.each(faults)('whose answer is: $action, is one', async (fault) => {
    await using harness = await Harness.make(impatient);
    await using vm = await harness.vm({ dialect: 'aenv', memoryMib: 16 });
    const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
    await vm.fault(fault);
    await vm.clearRequests();
    const view = await harness.capture(vmId, { resumeAfter: 'copy' });
    expect(view).toMatchObject({ status: 'published', vmRunning: true });
    expect(await sent(vm, 'resume')).toBe(1);
    expect(harness.service.getVm(vmId)?.pausedByUs).toBe(false);
    expect(harness.service.stuckPaused).toBe(0);
    await vm.clearFaults();
    await expectNextComplete(harness, vm, vmId);
  });

  test.each(faults)('whose answer is: $action, starts the child of a fork', async (fault) => {
    await using harness = await Harness.make(impatient);
    await using source = await harness.vm({ dialect: 'aenv', memoryMib: 16 });
    const { vmId } = await harness.attach(source, { trackingMode: 'dirty' });
    await using child = await harness.vm({ dialect: 'aenv', start: false });
    await child.fault(fault);
    const children = [{ socketPath: child.socketPath }];
    const made = valueOf(await harness.service.fork(vmId, { children }));
    expect(made.children).toMatchObject([{ failure: null }]);
    expect(await sent(child, 'resume')).toBe(1);
  });
});

test('a VM that no resume makes run is counted until one does', async () => {
  await using harness = await Harness.make();
  await using vm = await harness.vm({ dialect: 'aenv', memoryMib: 16 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  await vm.fault({ on: 'resume', action: 'refuse', times: 0 });
  const view = await harness.capture(vmId, { resumeAfter: 'commit' });
  expect(view.vmRunning).toBe(false);
  expect(harness.service.stuckPaused).toBe(1);
  await vm.clearFaults();
  await until(() => harness.service.getVm(vmId)?.pausedByUs === false);
  expect(harness.service.stuckPaused).toBe(0);
});

test('a VM state that was saved, though the VMM refused, loses no page', async () => {
  await using harness = await Harness.make();
  await using vm = await harness.vm({ dialect: 'firecracker', memoryMib: 16 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  await harness.published(vmId);
  await vm.run({ pages: { firstPage: 1200, pageCount: 50 }, value: 3 });
  // The VMM has forgotten these pages by now.
  await vm.fault({ on: 'snapshot-create', action: 'refuse', ...done });
  expect((await harness.capture(vmId)).failure?.kind).toBe('vmm-refused');
  expect((await vm.info()).state).toBe('Running');
  await expectNextComplete(harness, vm, vmId);
});

test('a child that was loaded, though its VMM refused, is not used, and its owner is told', async () => {
  await using harness = await Harness.make();
  await using source = await harness.vm({ dialect: 'aenv', memoryMib: 16 });
  const { vmId } = await harness.attach(source, { trackingMode: 'dirty' });
  await using child = await harness.vm({ dialect: 'aenv', start: false });
  await child.fault({ on: 'snapshot-load', action: 'refuse', ...done });
  const children = [{ socketPath: child.socketPath }];
  const made = valueOf(await harness.service.fork(vmId, { children }));
  expect(made.children).toMatchObject([{ vm: null, failure: { kind: 'vmm-refused' } }]);
  expect(made.children[0]?.failure?.message).toContain('its VM is Paused now');
  expect(harness.service.listVms().map((vm) => vm.vmId)).toEqual([vmId]);
});
