import { spawnSync } from 'node:child_process';
import { existsSync, mkdirSync, mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { stagingFolder, vmmFolder } from '../../src/capture/staging.ts';
import { captureId } from '../../src/units.ts';
import { Harness, valueOf } from './harness.ts';

/** Paths that something is mounted on: neither they nor the folders that hold them can go. */
class Busy implements Disposable {
  readonly #paths: string[] = [];

  make(path: string): void {
    if (this.#paths.includes(path)) return;
    const mounted = spawnSync('mount', ['--bind', path, path]);
    if (mounted.status !== 0) throw new Error(mounted.stderr.toString());
    this.#paths.push(path);
  }

  [Symbol.dispose](): void {
    for (const path of this.#paths.splice(0)) spawnSync('umount', [path]);
  }
}

/** Why nothing can be made busy here; null where it can. */
const whyNot = ((): string | null => {
  const path = mkdtempSync(join(tmpdir(), 'varve-busy-'));
  try {
    using busy = new Busy();
    busy.make(path);
    return null;
  } catch (error) {
    return String(error);
  } finally {
    rmSync(path, { recursive: true });
  }
})();
if (whyNot !== null) process.stdout.write(`nothing can be made busy here: ${whyNot}\n`);
const busyTest = test.skipIf(whyNot !== null);

const unremoved = 'a file that nothing needs could not be removed';

busyTest('an aborted capture whose files cannot be removed is aborted all the same', async () => {
  await using harness = await Harness.make(
    {},
    {
      stage: ({ captureId: id }, stage) => {
        if (stage === 'pause') busy.make(stagingFolder(harness.config, id));
      },
    },
  );
  using busy = new Busy();
  await using vm = await harness.vm({ dialect: 'aenv', memoryMib: 32 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  await vm.fault({ on: 'snapshot-create', action: 'refuse' });
  const failed = await harness.capture(vmId);
  await vm.clearFaults();
  expect(failed).toMatchObject({ status: 'aborted', failure: { kind: 'vmm-refused' } });
  expect(harness.nodeDb.getJob(failed.captureId)?.step).toBe('aborted');
  expect((await vm.info()).state).toBe('Running');
  expect(harness.warnings.map(({ what }) => what)).toEqual([unremoved]);
  await harness.published(vmId);
});

busyTest('a published capture whose files cannot be removed is published, once', async () => {
  const tried: string[] = [];
  await using harness = await Harness.make(
    {},
    {
      stage: ({ captureId: id }, stage) => {
        const memory = join(vmmFolder(stagingFolder(harness.config, id)), 'memory');
        if (stage !== 'pause' && existsSync(memory)) busy.make(memory);
      },
      publishFailed: (_capture, failure) => tried.push(failure.message),
    },
  );
  using busy = new Busy();
  await using vm = await harness.vm({ dialect: 'firecracker', memoryMib: 32, track: true });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  await harness.published(vmId);
  expect(tried).toEqual([]);
  // The memory file after the commit, then the folder.
  expect(harness.warnings.map(({ what }) => what)).toEqual([unremoved, unremoved]);
});

busyTest(
  'a daemon that cannot remove what its earlier life staged starts, and captures',
  async () => {
    await using harness = await Harness.make();
    using busy = new Busy();
    await using vm = await harness.vm({ dialect: 'e2b', memoryMib: 32 });
    const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
    const id = captureId('killed');
    const staged = stagingFolder(harness.config, id);
    valueOf(harness.nodeDb.createJob({ captureId: id, vmId, requestJson: '{}', createdAtMs: 1 }));
    const source = {
      clearsOnRead: true,
      bytesIn: 'process',
      advance: true,
      forgetsCommitted: false,
    } as const;
    valueOf(harness.nodeDb.begin(vmId, id, { ...source, scratchPaths: [staged] }));
    mkdirSync(staged);
    busy.make(staged);
    await harness.stop();
    await harness.start();
    expect(harness.service.getCapture(id)?.status).toBe('aborted');
    expect(existsSync(staged)).toBe(true);
    await harness.published(vmId);
    await harness.stop();
    busy[Symbol.dispose]();
    await harness.start();
    expect(existsSync(staged)).toBe(false);
  },
);
