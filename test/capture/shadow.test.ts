/** The shadow check on real small VMs: what the page tables show that the VMM does not say. */
import { describe, expect, test } from 'vitest';
import type { CaptureObserver } from '../../src/capture/observer.ts';
import type { LaunchOptions, MiniVm } from '../../src/minivm/launch.ts';
import type { VmId } from '../../src/units.ts';
import type { ShadowReport } from '../../src/vmm/shadow.ts';
import { allHashes, firstDifference, Harness } from './harness.ts';

const shadowOn = { memory_snapshot: { tracking_shadow: 'pagemap' } };

/** A child restored from a file, attached in mode `dirty`. */
async function child(
  harness: Harness,
  options: LaunchOptions,
): Promise<{ vm: MiniVm; vmId: VmId }> {
  await using source = await harness.vm({ ...options, memoryMib: 16 });
  const attached = await harness.attach(source, { trackingMode: 'dirty' });
  await source.run({ pages: { firstPage: 1500, pageCount: 100 }, value: 1 });
  const base = (await harness.published(attached.vmId)).snapshotId;
  const vm = await harness.restore(base, options);
  await vm.resume();
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty', launchParent: base });
  return { vm, vmId };
}

async function write(vm: MiniVm, value: number): Promise<void> {
  await vm.run({ pages: { firstPage: 1600 + value * 16, pageCount: 10 }, value });
  await vm.deviceWrites({ pages: { firstPage: 3000 + value * 16, pageCount: 7 }, value });
}

describe.each(['aenv', 'e2b'] as const)('dialect %s', (dialect) => {
  test('a VMM that names all writes is confirmed; pages it forgets are captured and counted', async () => {
    const reports: ShadowReport[] = [];
    const observer: Partial<CaptureObserver> = {
      shadowed: (_capture, report) => reports.push(report),
    };
    await using harness = await Harness.make(shadowOn, observer);
    const { vmId, ...of } = await child(harness, { dialect });
    await using vm = of.vm;
    await write(vm, 1);
    const honest = await harness.published(vmId);
    expect(honest.shadow).toMatchObject({ compared: 'all', shadowOnly: 0 });
    expect(honest.shadow).toHaveProperty('both', honest.selectedPages);

    await write(vm, 2);
    const expected = await allHashes(vm);
    await vm.fault({ on: 'dirty', action: 'no-device-writes', times: 0 });
    const lied = await harness.published(vmId);
    // Seven device writes of each round: the VMM names what was written since launch.
    expect(lied.shadow).toMatchObject({ compared: 'all', shadowOnly: 14 });
    expect(reports.at(-1)).toEqual(lied.shadow);
    await using copy = await harness.restore(lied.snapshotId, { dialect });
    expect(firstDifference(await allHashes(copy), expected)).toBeNull();
  });
});

test('without the check the same lie loses the pages, and no report says so', async () => {
  await using harness = await Harness.make();
  const { vmId, ...of } = await child(harness, { dialect: 'e2b' });
  await using vm = of.vm;
  await write(vm, 2);
  const expected = await allHashes(vm);
  await vm.fault({ on: 'dirty', action: 'no-device-writes', times: 0 });
  const made = await harness.published(vmId);
  expect(made.shadow).toBeNull();
  await using copy = await harness.restore(made.snapshotId, { dialect: 'e2b' });
  expect(firstDifference(await allHashes(copy), expected)).toBe(3032);
});

test('a VMM with epochs of its own is checked for pages that no layer stores yet', async () => {
  await using harness = await Harness.make(shadowOn);
  const { vmId, ...of } = await child(harness, { dialect: 'aenv', dirtyEpochs: true });
  await using vm = of.vm;
  await write(vm, 1);
  await harness.published(vmId);
  await write(vm, 2);
  const honest = await harness.published(vmId);
  expect(honest.shadow).toMatchObject({ compared: 'not-stored-yet', shadowOnly: 0 });
  await write(vm, 3);
  const expected = await allHashes(vm);
  await vm.fault({ on: 'dirty', action: 'no-device-writes', times: 0 });
  const lied = await harness.published(vmId);
  expect(lied.shadow).toMatchObject({ compared: 'not-stored-yet' });
  const missed = lied.shadow?.compared === 'nothing' ? 0 : (lied.shadow?.shadowOnly ?? 0);
  expect(missed).toBeGreaterThanOrEqual(7);
  await using copy = await harness.restore(lied.snapshotId, { dialect: 'aenv' });
  expect(firstDifference(await allHashes(copy), expected)).toBeNull();
});

test.each([
  ['a fresh VM', { dialect: 'e2b' }, 'dirty', 'the VM was not restored from a memory file'],
  ['mode mincore', { dialect: 'e2b' }, 'mincore', 'mode mincore is made of page tables itself'],
  [
    'upstream Firecracker',
    { dialect: 'firecracker' },
    'dirty',
    'the bytes come in a file of the VMM',
  ],
] as const)(
  '%s says that nothing can be compared',
  async (_what, options, trackingMode, reason) => {
    await using harness = await Harness.make(shadowOn);
    await using vm = await harness.vm({ ...options, memoryMib: 16 });
    const { vmId } = await harness.attach(vm, { trackingMode });
    const made = await harness.published(vmId);
    expect(made.shadow).toEqual({ compared: 'nothing', reason });
  },
);
