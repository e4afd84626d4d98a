/** What a program of before left: one process under two names. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import Sqlite from 'better-sqlite3';
import { expect, test } from 'vitest';
import { systemClock } from '../../src/clock.ts';
import { NodeDb } from '../../src/lineage/node-db.ts';
import { vmId } from '../../src/units.ts';
import { valueOf } from '../capture/harness.ts';

const vm = (id: string, startTimeTicks: bigint, boot: string) => ({
  vmId: vmId(id),
  socketPath: `/run/${id}.sock`,
  pid: 4000,
  startTimeTicks,
  bootId: boot,
  dialect: 'firecracker',
  trackingMode: 'dirty',
  imageBytes: null,
  launchParent: [],
  trackedSinceLaunch: true,
});

test('the first name keeps the process, and no set that was read under either is trusted', () => {
  const folder = mkdtempSync(join(tmpdir(), 'varve-doubles-'));
  try {
    const path = join(folder, 'node.db');
    const db = valueOf(NodeDb.open(path, systemClock));
    valueOf(db.attachVm(vm('a', 7n, 'boot')));
    valueOf(db.attachVm(vm('b', 8n, 'boot')));
    valueOf(db.attachVm(vm('other', 9n, 'boot')));
    db.close();
    const raw = new Sqlite(path);
    raw.exec("UPDATE vm SET start_time_ticks = '7', attached_at_ms = 9e15 WHERE vm_id = 'b'");
    raw.close();
    using again = valueOf(NodeDb.open(path, systemClock));
    expect(again.listVms().map((each) => each.vmId)).toEqual(['a', 'other']);
    expect(again.getVm(vmId('a'))?.lostReason).toMatch(/several names/);
    expect(again.getVm(vmId('other'))?.lostReason).toBeNull();
  } finally {
    rmSync(folder, { recursive: true, force: true });
  }
});

test('a process of an earlier boot does not own the one that has its number now', () => {
  const folder = mkdtempSync(join(tmpdir(), 'varve-doubles-'));
  try {
    using db = valueOf(NodeDb.open(join(folder, 'node.db'), systemClock));
    valueOf(db.attachVm(vm('a', 7n, 'boot')));
    expect(db.attachVm(vm('b', 7n, 'boot'))).toMatchObject({
      ok: false,
      error: { kind: 'vm-attached', vmId: 'a' },
    });
    valueOf(db.attachVm(vm('b', 7n, 'next boot')));
  } finally {
    rmSync(folder, { recursive: true, force: true });
  }
});
