/**
 * `varve serve` dies with SIGKILL in forks and attaches. After the restart what was committed is
 * published, children that were on record run on, and once they are detached no hold, folder, lease
 * or layer of them is left.
 */
import { join } from 'node:path';
import { expect, test } from 'vitest';
import type { CrashPoint } from '../../src/crash-points.ts';
import { launchMiniVm, type MiniVm } from '../../src/minivm/launch.ts';
import { temporaryFolder } from './fixtures.ts';
import { holdsSettled, leftovers } from './model/node-state.ts';
import { Daemon, allHashes, restoreInto } from './served.ts';

const eager = '[pipeline.publish]\nretry_min = "10ms"\nretry_max = "100ms"\n';

async function served(): Promise<{ daemon: Daemon; source: MiniVm }> {
  const folder = temporaryFolder();
  const socketPath = join(folder, 'source.sock');
  const options = { id: 'source', dialect: 'aenv', memoryMib: 8 } as const;
  const source = await launchMiniVm({ ...options, socketPath });
  const daemon = new Daemon(folder, eager);
  await daemon.start();
  await source.run({ pages: { firstPage: 1100, pageCount: 20 }, value: 1 });
  await daemon.attach({ socketPath, trackingMode: 'dirty' });
  return { daemon, source };
}

/** Waits for captures and compactions: then nothing is left over. */
async function atRest(daemon: Daemon): Promise<void> {
  for (const { captureId } of await daemon.captures()) await daemon.ended(captureId);
  let found = leftovers(daemon.folder);
  for (let asked = 0; found.length > 0 && asked < 400; asked += 1) {
    await daemon.vms();
    found = leftovers(daemon.folder);
  }
  expect(found).toEqual([]);
}

/**
 * Which of the two children are on record after the crash, and what became of the capture. Null: the
 * publish that dies goes its own way beside them.
 */
const forks: readonly [CrashPoint, readonly string[] | null, 'aborted' | 'published'][] = [
  ['fork-state-kept', [], 'aborted'],
  ['layer-sealed', [], 'aborted'],
  ['seal-recorded', [], 'published'],
  ['epoch-committed', [], 'published'],
  ['fork-materialised', [], 'published'],
  ['fork-child-attached', ['left'], 'published'],
  ['artifacts-stored', null, 'published'],
  ['snapshot-catalogued', null, 'published'],
];

test('killed in a fork: what is on record lives on, the rest goes', { timeout: 0 }, async () => {
  const made = await served();
  await using daemon = made.daemon;
  await using source = made.source;
  for (const [point, expectedKept, status] of forks) {
    await source.run({ pages: { firstPage: 1200, pageCount: 5 }, value: 2 });
    const names = ['left', 'right'];
    const minis: MiniVm[] = [];
    for (const id of names) {
      const socketPath = join(daemon.folder, `${id}.sock`);
      minis.push(await launchMiniVm({ id, socketPath, start: false }));
    }
    const children = minis.map(({ socketPath }, at) => ({ socketPath, vmId: names[at] }));
    daemon.crashAt(point);
    const asked = daemon.fork('source', { children, resumeAfter: 'commit' });
    await expect(asked, point).rejects.toThrow();
    expect(await daemon.exited(), point).toBe('SIGKILL');

    await daemon.start();
    await atRest(daemon);
    const [fork] = await daemon.captures();
    expect(fork?.status, point).toBe(status);
    const attached: string[] = (await daemon.vms()).map(({ vmId }) => vmId);
    const kept = names.filter((id) => attached.includes(id));
    if (expectedKept !== null) expect(kept, point).toEqual(expectedKept);
    // One for all of them.
    expect(await holdsSettled(daemon), point).toHaveLength(kept.length > 0 ? 1 : 0);
    for (const [at, mini] of minis.entries()) {
      const id = names[at] ?? '';
      if (kept.includes(id)) {
        // As loaded, where the daemon died before it let it run.
        if ((await mini.info()).state === 'Paused') await mini.resume();
        await mini.run({ pages: { firstPage: 1300, pageCount: 5 }, value: 3 });
        const expected = await allHashes(mini);
        const next = await daemon.ended((await daemon.startCapture(id)).captureId);
        expect(next.result?.predecessor, point).toBe(fork?.result?.layer);
        await using copy = await restoreInto(daemon, next.result?.snapshotId ?? '', 'aenv');
        expect(await allHashes(copy), point).toEqual(expected);
        await daemon.detach(id);
      }
      await mini[Symbol.asyncDispose]();
    }
    expect((await source.info()).state).toBe('Running');
    expect(await holdsSettled(daemon), point).toEqual([]);
    await atRest(daemon);
  }
});

test(
  'killed in an attach to a snapshot: no hold and no fetched layer stays',
  { timeout: 0 },
  async () => {
    const made = await served();
    await using daemon = made.daemon;
    await using source = made.source;
    void source;
    const { result } = await daemon.ended((await daemon.startCapture('source')).captureId);
    const launchParent = result?.snapshotId ?? '';
    // Its layers are only in the store then.
    await daemon.detach('source');
    await using vm = await restoreInto(daemon, launchParent, 'aenv', { id: 'copy' });
    const request = {
      socketPath: vm.socketPath,
      vmId: 'copy',
      trackingMode: 'dirty',
      launchParent,
    };
    for (const point of ['attach-hold-intended', 'attach-chain-local'] as const) {
      daemon.crashAt(point);
      await expect(daemon.attach(request), point).rejects.toThrow();
      expect(await daemon.exited(), point).toBe('SIGKILL');
      await daemon.start();
      await atRest(daemon);
      expect(await daemon.vms(), point).toEqual([]);
      expect(await holdsSettled(daemon), point).toEqual([]);
    }
    await daemon.attach(request);
    expect(await holdsSettled(daemon)).toHaveLength(1);
    await daemon.detach('copy');
    expect(await holdsSettled(daemon)).toEqual([]);
    await atRest(daemon);
  },
);
