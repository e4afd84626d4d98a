import { join } from 'node:path';
import { expect, test } from 'vitest';
import { allHashes, firstDifference, Harness, never } from './harness.ts';

test('a daemon that starts again finds its VMs, chains and captures', async () => {
  await using harness = await Harness.make();
  await using vm = await harness.vm({ dialect: 'aenv', memoryMib: 32 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  await vm.run({ pages: { firstPage: 2000, pageCount: 50 }, value: 1 });
  const base = await harness.published(vmId);
  await harness.stop();
  await harness.start();
  const found = harness.service.getVm(vmId);
  expect(found?.state).toBe('attached');
  expect(found?.memoryParent).toBe(base.layer);
  expect(harness.service.listCaptures(vmId)[0]?.result?.digest).toBe(base.digest);
  await vm.run({ pages: { firstPage: 3000, pageCount: 5 }, value: 2 });
  const expected = await allHashes(vm);
  const next = await harness.published(vmId);
  expect(next.predecessor).toBe(base.layer);
  await using copy = await harness.restore(next.snapshotId);
  expect(firstDifference(await allHashes(copy), expected)).toBeNull();
});

test('where the memory of a VM is stays known: its pages may no longer tell after a restart', async () => {
  await using harness = await Harness.make();
  await using vm = await harness.vm({ dialect: 'firecracker', memoryMib: 32, track: true });
  await vm.run({ pages: { firstPage: 2000, pageCount: 50 }, value: 1 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'mincore' });
  await harness.published(vmId);
  // What told the guest's memory from other memory is gone.
  await vm.run({ pages: { firstPage: 2000, pageCount: 50 }, fill: 'zero' });
  const expected = await allHashes(vm);
  await harness.stop();
  await harness.start();
  const next = await harness.published(vmId);
  await using copy = await harness.restore(next.snapshotId);
  expect(firstDifference(await allHashes(copy), expected)).toBeNull();
});

test('upstream, little written since: where the memory is, is proved by all of it', async () => {
  await using harness = await Harness.make();
  await using vm = await harness.vm({ dialect: 'firecracker', memoryMib: 32, track: true });
  await vm.run({ pages: { firstPage: 2000, pageCount: 7 }, value: 1 });
  // Whoever took this snapshot had the VMM forget what was written.
  await vm.pause();
  const snapshotPath = join(harness.folder, 'their-state');
  const memFilePath = join(harness.folder, 'their-memory');
  await vm.createSnapshot({ type: 'Diff', snapshotPath, memFilePath });
  await vm.resume();
  const expected = await allHashes(vm);
  const { vmId } = await harness.attach(vm, { trackingMode: 'mincore' });
  const made = await harness.published(vmId);
  expect(made.dataBytes).toBeLessThan(30 * 4096);
  await using copy = await harness.restore(made.snapshotId);
  expect(firstDifference(await allHashes(copy), expected)).toBeNull();
});

test('a capture whose catalog is gone is committed, its VM runs, and it is published later', async () => {
  const failures: string[] = [];
  await using harness = await Harness.make(
    { pipeline: { publish: { retry_min: '10ms', retry_max: '100ms' } } },
    { publishFailed: (_capture, failure) => failures.push(failure.kind) },
  );
  await using vm = await harness.vm({ dialect: 'aenv', memoryMib: 32 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  await vm.run({ pages: { firstPage: 2000, pageCount: 50 }, value: 1 });
  await harness.catalog.close();
  const started = await harness.startCapture(vmId, { resumeAfter: 'commit' });
  const left = await harness.service.waitFor(started.captureId, never);
  expect(left.status).toBe('committed');
  expect(left.failure?.kind).toBe('catalog-closed');
  expect(harness.service.getVm(vmId)?.epoch).toBe(2);
  await harness.stop();
  expect(failures.length).toBeGreaterThan(0);
  await harness.start();
  for (;;) {
    if (harness.service.getCapture(started.captureId)?.status === 'published') break;
    await new Promise((resolve) => setImmediate(resolve));
  }
  const page = await harness.catalog.list({});
  expect(page.ok && page.value.snapshots).toHaveLength(1);
  expect((await vm.info()).state).toBe('Running');
});

test('the same idempotency key with the same request is the same capture, with another it is refused', async () => {
  await using harness = await Harness.make();
  await using vm = await harness.vm({ dialect: 'aenv', memoryMib: 32 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  const first = await harness.capture(vmId, { idempotencyKey: 'k1', resumeAfter: 'copy' });
  const again = await harness.startCapture(vmId, { idempotencyKey: 'k1', resumeAfter: 'copy' });
  expect(again.captureId).toBe(first.captureId);
  const named = { idempotencyKey: 'k2', alias: 'mine', resumeAfter: 'copy' } as const;
  const mine = await harness.capture(vmId, named);
  // Its own snapshot has the alias by now, and the VM is gone.
  await vm.kill();
  await harness.stop();
  await harness.start();
  expect((await harness.startCapture(vmId, named)).captureId).toBe(mine.captureId);
  const other = await harness.service.startCapture(vmId, { idempotencyKey: 'k1' });
  expect(other.ok ? '' : other.error.kind).toBe('idempotency-conflict');
});
