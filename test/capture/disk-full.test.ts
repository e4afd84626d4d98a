import { spawnSync } from 'node:child_process';
import { expect, test } from 'vitest';
import { allHashes, firstDifference, Harness } from './harness.ts';

/** A small filesystem of its own over a folder; null, with the reason printed, where it can't be. */
function smallDisk(folder: string, size: string): Disposable | null {
  const mounted = spawnSync('mount', ['-t', 'tmpfs', '-o', `size=${size}`, 'tmpfs', folder]);
  if (mounted.status !== 0) {
    process.stdout.write(`no small disk: mount says ${mounted.stderr.toString().trim()}\n`);
    return null;
  }
  return { [Symbol.dispose]: () => void spawnSync('umount', [folder]) };
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
