import { join } from 'node:path';
import Sqlite from 'better-sqlite3';
import { expect, test } from 'vitest';
import { systemClock } from '../../src/clock.ts';
import { NodeDb } from '../../src/lineage/node-db.ts';
import { schemaSteps } from '../../src/lineage/schema.ts';
import { bytes, captureId, holdId, vmId } from '../../src/units.ts';
import { PAGES, attach, captureTo, failed, layer, mustFail, mustOk } from './fixtures.ts';
import { openDb, temporaryFolder } from './fixtures.ts';

const hold = holdId('h1');
const vm = vmId('vm-1');
const restore = { kind: 'restore', id: 'r1' } as const;
const queued = (db: NodeDb): string[] => db.pendingReleases(10).map(({ holdId: id }) => id);

/** As the service attaches: with what the VM owns and was started from. */
function attachWith(db: NodeDb, id: string, o: { pid?: number; preparedId?: string } = {}): void {
  mustOk(
    db.attachVm({
      ...{ vmId: vmId(id), socketPath: `/run/${id}.sock`, pid: o.pid ?? 1, startTimeTicks: 1n },
      ...{ dialect: 'aenv', trackingMode: 'dirty', imageBytes: bytes(PAGES * 4096) },
      ...{ launchParent: [], trackedSinceLaunch: true, hold, preparedId: o.preparedId ?? null },
    }),
  );
}

/** A fork's capture, committed. */
function commitFork(db: NodeDb, id: string): void {
  captureTo(db, vm, id, { selected: [1] });
  mustOk(db.sealed(captureId(id), layer(db.getVm(vm)?.memoryHead ?? null)));
  mustOk(db.commit(captureId(id), { preparedId: id, hold }));
}

test('H2 the release is queued with the last owner, and not before', () => {
  const db = openDb();
  mustOk(db.ownHold(hold, restore));
  attachWith(db, 'vm-1', { pid: 1 });
  attachWith(db, 'vm-2', { pid: 2 });
  mustOk(db.endNeed('restore', 'r1'));
  mustOk(db.endNeed('restore', 'r1'));
  mustOk(db.detachVm(vm));
  expect([queued(db), db.isHoldOwned(hold)]).toEqual([[], true]);
  mustOk(db.detachVm(vmId('vm-2')));
  expect([queued(db), db.isHoldOwned(hold)]).toEqual([['h1'], false]);
});

test('H2 a VM that was attached already keeps its first hold; the second has no owner but its restore', () => {
  const db = openDb();
  attachWith(db, 'vm-1');
  const second = holdId('h2');
  mustOk(db.ownHold(second, restore));
  const record = db.getVm(vm);
  if (record === undefined) throw new Error('attached');
  mustOk(db.attachVm({ ...record, launchParent: [], trackedSinceLaunch: true, hold: second }));
  mustOk(db.endNeed('restore', 'r1'));
  expect(queued(db)).toEqual(['h2']);
  expect(db.holdOwners()).toEqual([{ hold, kind: 'vm', id: 'vm-1' }]);
});

test('H3 a VM that is captured or paused by us cannot be detached, so it keeps its hold', () => {
  const db = openDb();
  attachWith(db, 'vm-1');
  captureTo(db, vm, 'c1', { selected: [1] });
  mustOk(db.markPaused(vm, captureId('c1')));
  expect(mustFail(db.detachVm(vm)).kind).toBe('capture-running');
  mustOk(db.abort(captureId('c1'), failed));
  // Paused still: its resume has not been answered.
  expect(mustFail(db.detachVm(vm)).kind).toBe('capture-running');
  expect([queued(db), db.isHoldOwned(hold)]).toEqual([[], true]);
  mustOk(db.clearPaused(vm, captureId('c1')));
  mustOk(db.detachVm(vm));
  expect(queued(db)).toEqual(['h1']);
});

test('H4 restores and prepared entries that no VM uses end with the life of the daemon', () => {
  const folder = temporaryFolder();
  const before = mustOk(NodeDb.open(join(folder, 'node.db'), systemClock));
  attach(before);
  commitFork(before, 'c1');
  captureTo(before, vm, 'c2', { selected: [2] });
  const head = before.getVm(vm)?.memoryHead ?? null;
  if (head === null) throw new Error('committed');
  mustOk(before.ownHold(holdId('h2'), restore));
  mustOk(before.takeLease('restore', 'r1', head));
  mustOk(before.ownHold(holdId('h3'), { kind: 'prepared', id: 'unused' }));
  attachWith(before, 'child', { pid: 2, preparedId: 'c1' });
  before.close();

  const db = openDb(folder);
  mustOk(db.endEarlierNeeds());
  expect(queued(db).sort()).toEqual(['h2', 'h3']);
  expect(db.holdOwners().map(({ kind, id }) => [kind, id])).toEqual([
    ['prepared', 'c1'],
    ['vm', 'child'],
  ]);
  expect(db.leases().map(({ holder }) => holder)).not.toContain('restore');
  expect(db.leases().map(({ holder }) => holder)).toContain('prepared');
  mustOk(db.detachVm(vmId('child')));
  expect(db.isPreparedUsed('c1')).toBe(false);
  expect(queued(db)).not.toContain('h1');
  mustOk(db.endEarlierNeeds());
  expect(queued(db)).toContain('h1');
  expect(db.leases().map(({ holder }) => holder)).not.toContain('prepared');
});

test('I11 a commit leases its layer for the prepared entry; a repeated or recovered one adds nothing', () => {
  const db = openDb();
  attach(db);
  commitFork(db, 'c1');
  const made = db.getJob(captureId('c1'))?.layer?.uuid;
  expect(db.leases()).toContainEqual({ holder: 'prepared', holderId: 'c1', layer: made });
  mustOk(db.endNeed('prepared', 'c1'));
  mustOk(db.commit(captureId('c1'), { preparedId: 'c1', hold }));
  expect([queued(db), db.holdOwners()]).toEqual([['h1'], []]);
});

test('a node.db of before keeps the holds and the prepared entries of its VMs', () => {
  const folder = temporaryFolder();
  const path = join(folder, 'node.db');
  const old = new Sqlite(path);
  for (const step of schemaSteps.slice(0, 2)) old.exec(step);
  old.pragma('user_version = 2');
  const entry = '0b0e7f5e-6a43-4b0e-9d0e-3f7f0a4f1c55';
  const insert = old.prepare(
    `INSERT INTO vm (vm_id, socket_path, pid, start_time_ticks, dialect, tracking_mode, epoch,
       lost_if_clearing, read_cleared, facts_json, attached_at_ms, detached_at_ms)
     VALUES (?, '/run/a.sock', ?, '1', 'aenv', 'dirty', 1, 0, 0, ?, 1, ?)`,
  );
  const prepared = `/state/prepared/${entry}`;
  insert.run('child', 1, JSON.stringify({ version: '1.7', hold: 'h1', prepared }), null);
  insert.run('fresh', 2, JSON.stringify({ version: '1.7', hold: null, prepared: null }), null);
  insert.run('gone', 3, JSON.stringify({ version: '1.7', hold: 'h2', prepared }), 5);
  old.close();

  const db = openDb(folder);
  expect(db.holdOwners()).toEqual([{ hold: 'h1', kind: 'vm', id: 'child' }]);
  expect(queued(db)).toEqual(['h2']);
  expect(db.listVms().map(({ vmId: id, preparedId }) => [id, preparedId])).toEqual([
    ['child', entry],
    ['fresh', null],
  ]);
  expect(db.listVms().map(({ factsJson }) => factsJson)).toEqual([
    '{"version":"1.7"}',
    '{"version":"1.7"}',
  ]);
  expect(db.isPreparedUsed(entry)).toBe(true);
  mustOk(db.detachVm(vmId('child')));
  expect([db.isPreparedUsed(entry), queued(db)]).toEqual([false, ['h2', 'h1']]);
});
