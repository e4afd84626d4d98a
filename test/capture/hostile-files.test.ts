/** A VMM that puts something else in the place of what it was asked to write. */
import { spawnSync } from 'node:child_process';
import {
  chmodSync,
  closeSync,
  ftruncateSync,
  linkSync,
  mkdirSync,
  openSync,
  readFileSync,
  rmSync,
  statSync,
  symlinkSync,
  writeFileSync,
} from 'node:fs';
import { join } from 'node:path';
import { describe, expect, test } from 'vitest';
import type { CaptureView } from '../../src/capture/types.ts';
import { allBytes, firstDifferingPage, Harness, until } from './harness.ts';

/** What a hostile VMM leaves at `path`; `secret` is a file that only root may read. */
const swaps: Readonly<Record<string, (path: string, secret: string) => void>> = {
  'a symbolic link to a private file': (path, secret) => symlinkSync(secret, path),
  'a second name of a private file': (path, secret) => linkSync(secret, path),
  'a pipe that nobody feeds': (path) => void spawnSync('mkfifo', [path]),
  'a folder': (path) => {
    mkdirSync(path);
  },
  'a file of a tebibyte': (path) => {
    const fd = openSync(path, 'w');
    ftruncateSync(fd, 2 ** 40);
    closeSync(fd);
  },
  'a link to a device': (path) => symlinkSync('/dev/zero', path),
};

describe.each(['aenv', 'firecracker'] as const)('dialect %s', (dialect) => {
  test.each(Object.keys(swaps))('%s in place of the VM state is refused', async (what) => {
    const armed = { on: false };
    const observer = {
      stage: (capture: CaptureView, stage: string, state: string): void => {
        if (!armed.on || stage !== 'dirty-bitmap' || state !== 'ended') return;
        armed.on = false;
        const path = join(harness.config.paths.staging, capture.captureId, 'vmm', 'vm-state');
        rmSync(path, { recursive: true, force: true });
        swaps[what]?.(path, secret);
      },
    };
    await using harness = await Harness.make({}, observer);
    const secret = join(harness.folder, 'secret');
    writeFileSync(secret, 'of root alone');
    chmodSync(secret, 0o600);
    await using vm = await harness.vm({ dialect, memoryMib: 16 });
    await using other = await harness.vm({ dialect, memoryMib: 16 });
    const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
    const second = await harness.attach(other, { trackingMode: 'dirty' });
    await vm.run({ pages: { firstPage: 1000, pageCount: 50 }, value: 1 });
    await other.run({ pages: { firstPage: 1000, pageCount: 50 }, value: 2 });
    armed.on = true;
    const refused = await harness.capture(vmId);
    expect(armed.on).toBe(false);
    expect(refused).toMatchObject({ status: 'aborted', failure: { kind: 'vmm-file-bad' } });
    expect(refused.vmRunning).toBe(true);
    expect(readFileSync(secret, 'utf8')).toBe('of root alone');
    expect(statSync(secret).mode & 0o777).toBe(0o600);
    expect(statSync('/dev/zero').mode & 0o777).toBe(0o666);

    // Nobody waits for it: the others go on, and so does this VM.
    await harness.published(second.vmId);
    const made = await harness.published(vmId);
    const memory = await harness.memoryOf(made.snapshotId);
    expect(firstDifferingPage(memory, await allBytes(vm))).toBeNull();
    await until(async () => (await harness.leftovers()).staging.length === 0);
  });
});

test.each(['a symbolic link to a private file', 'a second name of a private file', 'a folder'])(
  '%s in place of the memory file is refused',
  async (what) => {
    await using harness = await Harness.make();
    const secret = join(harness.folder, 'secret');
    await using vm = await harness.vm({ dialect: 'firecracker', memoryMib: 16 });
    writeFileSync(secret, Buffer.alloc(16 * 1024 * 1024, 'x'));
    chmodSync(secret, 0o600);
    const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
    await vm.run({ pages: { firstPage: 1000, pageCount: 50 }, value: 1 });
    await harness.published(vmId);
    await vm.run({ pages: { firstPage: 1000, pageCount: 50 }, value: 2 });
    // Swapped while the answer is on its way.
    const folder = harness.config.paths.staging;
    await vm.fault({ on: 'snapshot-create', action: 'delay', when: 'done', afterMs: 1500 });
    const started = await harness.startCapture(vmId);
    const path = join(folder, started.captureId, 'vmm', 'memory');
    await until(() => statSync(path, { throwIfNoEntry: false })?.size === 16 * 1024 * 1024);
    rmSync(path, { recursive: true, force: true });
    swaps[what]?.(path, secret);
    const refused = await harness.service.waitFor(started.captureId, new AbortController().signal);
    expect(refused).toMatchObject({ status: 'aborted', failure: { kind: 'vmm-file-bad' } });
    expect(statSync(secret).mode & 0o777).toBe(0o600);
    const made = await harness.published(vmId);
    const memory = await harness.memoryOf(made.snapshotId);
    expect(firstDifferingPage(memory, await allBytes(vm))).toBeNull();
  },
);
