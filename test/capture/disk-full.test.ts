import { spawnSync } from 'node:child_process';
import { closeSync, openSync, rmSync, writeSync } from 'node:fs';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { allHashes, firstDifference, Harness, never } from './harness.ts';

/** A small filesystem of its own over a folder; null, with the reason printed, where it can't be. */
function smallDisk(folder: string, size: string): Disposable | null {
  const mounted = spawnSync('mount', ['-t', 'tmpfs', '-o', `size=${size}`, 'tmpfs', folder]);
  if (mounted.status !== 0) {
    process.stdout.write(`no small disk: mount says ${mounted.stderr.toString().trim()}\n`);
    return null;
  }
  return { [Symbol.dispose]: () => void spawnSync('umount', ['--lazy', folder]) };
}

test('a disk that is full in commit aborts the capture, leaves nothing, and works again with space', async (context) => {
  await using harness = await Harness.make();
  using disk = smallDisk(harness.config.paths.layers, '512k');
  if (disk === null) {
    context.skip();
    return;
  }
  await using vm = await harness.vm({ dialect: 'aenv', memoryMib: 32 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  await vm.run({ pages: { firstPage: 2000, pageCount: 1000 }, value: 1 });
  const failed = await harness.capture(vmId);
  expect(failed.status).toBe('aborted');
  expect(failed.failure?.kind).toBe('layer-no-space');
  expect(failed.vmRunning).toBe(true);
  expect(await harness.leftovers()).toEqual({ layers: [], staging: [] });
  const page = await harness.catalog.list({});
  expect(page.ok && page.value.snapshots).toEqual([]);
  const { layers } = harness.config.paths;
  spawnSync('mount', ['-o', 'remount,size=64m', layers]);
  const expected = await allHashes(vm);
  const made = await harness.published(vmId);
  await using copy = await harness.restore(made.snapshotId);
  expect(firstDifference(await allHashes(copy), expected)).toBeNull();
});

/** Leaves no byte on the disk of `folder`; what it wrote for that is returned. */
function fill(folder: string): string {
  const path = join(folder, 'filler');
  const file = openSync(path, 'w');
  for (const size of [1 << 20, 4096]) {
    const piece = Buffer.alloc(size, 1);
    try {
      while (writeSync(file, piece) === size);
    } catch (error) {
      expect(error).toMatchObject({ code: 'ENOSPC' });
    }
  }
  closeSync(file);
  return path;
}

test('an abort that node.db has no space for is recorded once there is some', async (context) => {
  await using harness = await Harness.make();
  const { state } = harness.config.paths;
  await harness.stop();
  using disk = smallDisk(state, '96m');
  if (disk === null) {
    context.skip();
    return;
  }
  await harness.start();
  await using vm = await harness.vm({ dialect: 'e2b', memoryMib: 16 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  await harness.published(vmId);
  await vm.fault({ on: 'snapshot-create', action: 'hang' });
  const { captureId } = await harness.startCapture(vmId);
  while ((await vm.info()).state !== 'Paused');
  const filler = fill(state);
  const cancelled = await harness.service.cancelCapture(captureId);
  expect(cancelled.ok && cancelled.value.status).toBe('aborted');
  expect(harness.nodeDb.getJob(captureId)?.step).not.toBe('aborted');
  expect(harness.service.getCapture(captureId)?.status).toBe('aborted');
  await vm.clearFaults();
  rmSync(filler);
  await harness.published(vmId);
  expect(harness.nodeDb.getJob(captureId)?.step).toBe('aborted');
  await harness.stop();
});

test('a publish that node.db has no space for is recorded once there is some', async (context) => {
  const filled: string[] = [];
  const failures: string[] = [];
  await using harness = await Harness.make(
    { pipeline: { publish: { retry_min: '10ms', retry_max: '100ms' } } },
    {},
    {
      around: (real) => ({
        ...real,
        publish: async (request) => {
          const published = await real.publish(request);
          filled.push(fill(harness.config.paths.state));
          return published;
        },
      }),
    },
  );
  const { state } = harness.config.paths;
  await harness.stop();
  using disk = smallDisk(state, '96m');
  if (disk === null) {
    context.skip();
    return;
  }
  await harness.start({
    publishFailed: (_capture, { kind }) => {
      failures.push(kind);
      rmSync(filled[0] ?? '');
    },
  });
  await using vm = await harness.vm({ dialect: 'e2b', memoryMib: 16 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  const { captureId } = await harness.startCapture(vmId);
  const made = await harness.service.waitFor(captureId, never);
  expect(failures).toEqual(['node-db-io']);
  expect(made).toMatchObject({ status: 'published' });
  await harness.stop();
});
