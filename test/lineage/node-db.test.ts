import {
  chmodSync,
  copyFileSync,
  existsSync,
  mkdirSync,
  readFileSync,
  rmdirSync,
  writeFileSync,
} from 'node:fs';
import { join } from 'node:path';
import Sqlite from 'better-sqlite3';
import { expect, test } from 'vitest';
import { systemClock } from '../../src/clock.ts';
import { deleteUnneededLayers } from '../../src/lineage/local-files.ts';
import { NodeDb } from '../../src/lineage/node-db.ts';
import { schemaVersion } from '../../src/lineage/schema.ts';
import { bytes, captureId, digest, holdId, pageCount, vmId } from '../../src/units.ts';
import { joinSets } from '../../src/lineage/page-sets.ts';
import { emptyBitmap } from '../../src/vmm/bitmap.ts';
import { attach, captureTo, chain, clearing, failed, finish } from './fixtures.ts';
import { layer, mustFail, mustOk, newJob, openDb, pages, temporaryFolder } from './fixtures.ts';

const vm = vmId('vm-1');
const c = captureId;
const open = (path: string) => NodeDb.open(path, systemClock);

test('everything is there again after a close: chain, ledger, jobs, pause, 64-bit start time', () => {
  const folder = temporaryFolder();
  const db = mustOk(open(join(folder, 'node.db')));
  attach(db, { launchParent: chain(3) });
  captureTo(db, vm, 'c1', { selected: [1], zero: [2] });
  mustOk(db.markPaused(vm, c('c1')));
  const before = [db.getVm(vm), db.getJob(c('c1')), db.ledger(vm), db.memoryChain(vm)];
  db.close();
  const again = openDb(folder);
  expect([again.getVm(vm), again.getJob(c('c1')), again.ledger(vm), again.memoryChain(vm)]).toEqual(
    before,
  );
  expect(again.getVm(vm)?.startTimeTicks).toBe(9_007_199_254_740_993n);
});

test('a second daemon on the same node.db is refused', () => {
  const folder = temporaryFolder();
  openDb(folder);
  expect(mustFail(open(join(folder, 'node.db'))).kind).toBe('node-db-locked');
});

test('a newer node.db, a damaged one and a missing folder are each refused by name', () => {
  const folder = temporaryFolder();
  const path = join(folder, 'node.db');
  mustOk(open(path)).close();
  const raw = new Sqlite(path);
  raw.pragma(`user_version = ${schemaVersion + 1}`);
  raw.close();
  expect(mustFail(open(path))).toMatchObject({ kind: 'node-db-newer' });
  writeFileSync(
    join(folder, 'bad.db'),
    'this is no database, but it is long enough to look at '.repeat(20),
  );
  expect(mustFail(open(join(folder, 'bad.db'))).kind).toBe('node-db-corrupt');
  expect(mustFail(open(join(folder, 'none', 'node.db'))).kind).toBe('node-db-io');
});

test.skipIf(process.getuid?.() === 0)('a read-only folder is refused as node-db-io', () => {
  const folder = temporaryFolder();
  chmodSync(folder, 0o555);
  expect(mustFail(open(join(folder, 'node.db'))).kind).toBe('node-db-io');
});

test('the same idempotency key and request is the same job; another request is a conflict', () => {
  const db = openDb();
  attach(db);
  const request = { vmId: vm, idempotencyKey: 'k', requestJson: '{"a":1}', createdAtMs: 5 };
  const first = mustOk(db.createJob({ ...request, captureId: c('c1') }));
  expect(first.created).toBe(true);
  const again = mustOk(db.createJob({ ...request, captureId: c('c2') }));
  expect(again).toEqual({ job: first.job, created: false });
  mustOk(db.abort(c('c1'), failed));
  expect(mustOk(db.createJob({ ...request, captureId: c('c3') })).job.step).toBe('aborted');
  const other = db.createJob({ ...request, captureId: c('c4'), requestJson: '{"a":2}' });
  expect(mustFail(other).kind).toBe('idempotency-conflict');
});

test('jobs are listed newest first, page by page', () => {
  const db = openDb();
  attach(db);
  for (let i = 0; i < 7; i += 1) {
    mustOk(db.createJob({ captureId: c(`c${i}`), vmId: vm, requestJson: '', createdAtMs: i >> 1 }));
    mustOk(db.abort(c(`c${i}`), failed));
  }
  const first = db.listJobs({ limit: 4 });
  expect(first.map((job) => job.captureId)).toEqual(['c6', 'c5', 'c4', 'c3']);
  const after = first.at(-1);
  if (after === undefined) throw new Error('a page has four jobs');
  expect(db.listJobs({ vmId: vm, limit: 9, after }).map((job) => job.captureId)).toEqual([
    'c2',
    'c1',
    'c0',
  ]);
  expect(db.listJobs({ vmId: vmId('other'), limit: 9 })).toEqual([]);
});

test('attaching the same process again is the same record; another one is refused', () => {
  const db = openDb();
  const first = attach(db);
  expect(attach(db)).toEqual(first);
  const v = { vmId: vm, socketPath: '/x', pid: 1, startTimeTicks: 1n, dialect: 'e2b' };
  const more = { trackingMode: 'dirty', imageBytes: null, launchParent: [] };
  const other = { ...v, ...more, trackedSinceLaunch: true };
  expect(mustFail(db.attachVm(other))).toMatchObject({ kind: 'vm-exists' });
  mustOk(db.detachVm(vm));
  expect(db.listVms()).toEqual([]);
  expect(mustOk(db.attachVm(other))).toMatchObject({ pid: 1, epoch: 1, imageBytes: null });
});

test('a launch parent shares the layers that the node has, and contradictions are refused', () => {
  const db = openDb();
  const base = chain(3);
  attach(db, { launchParent: base });
  attach(db, { id: 'vm-2', pid: 2, launchParent: base.slice(0, 2) });
  expect(db.localLayers()).toHaveLength(3);
  const forged = base.map((l, i) =>
    i === 1 ? { ...l, digest: digest(`sha256:${'0'.repeat(64)}`) } : l,
  );
  const v = { vmId: vmId('vm-3'), socketPath: '/x', pid: 3, startTimeTicks: 3n, dialect: 'e2b' };
  const more = { trackingMode: 'dirty', imageBytes: null, trackedSinceLaunch: true };
  const attempt = db.attachVm({ ...v, ...more, launchParent: forged });
  expect(mustFail(attempt).kind).toBe('layer-mismatch');
  expect(
    mustFail(db.attachVm({ ...v, ...more, launchParent: [layer(base[0]?.uuid ?? null)] })).kind,
  ).toBe('layer-mismatch');
  expect(db.getVm(vmId('vm-3'))).toBeUndefined();
});

test('layers that nothing needs are deleted with their files, top down; the rest stay', async () => {
  const folder = temporaryFolder();
  const db = openDb(folder);
  attach(db);
  const make = (id: string): string => {
    captureTo(db, vm, id, { selected: [1] });
    const parent = db.getJob(c(id))?.parentUuid ?? null;
    const made = layer(parent, { path: join(folder, `${id}.lsmt`) });
    writeFileSync(made.path, id);
    mustOk(db.sealed(c(id), made));
    mustOk(db.commit(c(id)));
    return made.path;
  };
  const paths = ['c1', 'c2', 'c3'].map(make);
  for (const id of ['c1', 'c2', 'c3']) mustOk(db.published(c(id), `s-${id}` as never));
  expect(mustOk(await deleteUnneededLayers(db)).deleted).toEqual([]);
  const middle = db.memoryChain(vm)?.layers[1]?.uuid ?? layer(null).uuid;
  mustOk(db.takeLease('prepared', 'entry-1', middle));
  mustOk(db.detachVm(vm));
  expect(mustOk(await deleteUnneededLayers(db)).deleted).toHaveLength(1);
  expect(paths.map((path) => existsSync(path))).toEqual([true, true, false]);
  expect(mustFail(db.takeLease('prepared', 'x', 'gone' as never)).kind).toBe('layer-unknown');
  expect(mustOk(db.dropLeases('prepared', 'entry-1'))).toBe(1);
  expect(mustOk(await deleteUnneededLayers(db)).deleted).toHaveLength(2);
  expect(paths.some((path) => existsSync(path))).toBe(false);
  expect(db.localLayers()).toEqual([]);
});

test('a layer whose file cannot be removed keeps its row and those below, until it can', async () => {
  const folder = temporaryFolder();
  const db = openDb(folder);
  const path = (name: string): string => join(folder, name);
  const below = layer(null, { path: path('below') });
  const stuck = layer(below.uuid, { path: path('stuck') });
  const above = layer(stuck.uuid, { path: path('above') });
  for (const name of ['below', 'above']) writeFileSync(path(name), name);
  // A folder is no file: it cannot be unlinked.
  mkdirSync(path('stuck'));
  const lease = { holder: 'restore', holderId: 'r' } as const;
  mustOk(db.addChain([below, stuck, above], { managed: true, published: true }, lease));
  mustOk(db.dropLeases('restore', 'r'));
  const first = mustOk(await deleteUnneededLayers(db));
  expect(first.deleted).toEqual([above.uuid, below.uuid]);
  expect(first.failed).toEqual([{ uuid: stuck.uuid, path: stuck.path, code: 'EISDIR' }]);
  expect(mustOk(db.condemnLayers()).map(({ uuid }) => uuid)).toEqual([stuck.uuid, below.uuid]);
  rmdirSync(path('stuck'));
  expect(mustOk(await deleteUnneededLayers(db)).failed).toEqual([]);
  expect(mustOk(db.condemnLayers())).toEqual([]);
});

test('a condemned layer cannot be taken up again, and a crash before its file went is made good', async () => {
  const folder = temporaryFolder();
  const db = openDb(folder);
  const path = join(folder, 'a.lsmt');
  writeFileSync(path, 'a');
  const a = layer(null, { path });
  mustOk(
    db.addChain([a], { managed: true, published: true }, { holder: 'restore', holderId: 'r' }),
  );
  mustOk(db.dropLeases('restore', 'r'));
  expect(mustOk(db.condemnLayers())).toEqual([{ uuid: a.uuid, unlink: path }]);
  expect(mustFail(db.takeLease('restore', 'r', a.uuid)).kind).toBe('layer-unknown');
  expect(mustOk(await deleteUnneededLayers(db)).deleted).toEqual([a.uuid]);
  expect(existsSync(path)).toBe(false);
});

test('a chain whose old layers are being deleted can be fetched anew, and its new files stay', async () => {
  const folder = temporaryFolder();
  const db = openDb(folder);
  const lease = { holder: 'restore', holderId: 'r' } as const;
  const flags = { managed: true, published: true };
  const path = (name: string): string => join(folder, name);
  const below = layer(null, { path: path('below') });
  const head = layer(below.uuid, { path: path('head') });
  mustOk(db.addChain([below, head], flags, lease));
  mustOk(db.dropLeases('restore', 'r'));
  const condemned = mustOk(db.condemnLayers());
  // The same file would go with the deletion that is under way; another layer is another layer.
  expect(mustFail(db.addChain([below], flags, lease)).kind).toBe('layer-mismatch');
  const other = layer(null, { uuid: below.uuid, path: path('other') });
  expect(mustFail(db.addChain([other], flags, lease)).kind).toBe('layer-mismatch');
  const anew = [
    { ...below, path: path('below-anew') },
    { ...head, path: path('head-anew') },
  ];
  for (const file of anew) writeFileSync(file.path, 'bytes');
  mustOk(db.addChain(anew, flags, lease));
  mustOk(db.forgetLayers(condemned.map(({ uuid }) => uuid)));
  expect(mustOk(await deleteUnneededLayers(db))).toEqual({ deleted: [], failed: [] });
  expect(db.localLayers()).toMatchObject(anew);
});

test('files that others own are never deleted, only forgotten', async () => {
  const folder = temporaryFolder();
  const db = openDb(folder);
  const path = join(folder, 'store.lsmt');
  writeFileSync(path, 'bytes');
  attach(db, { launchParent: [layer(null, { path })] });
  mustOk(db.detachVm(vm));
  expect(mustOk(await deleteUnneededLayers(db)).deleted).toHaveLength(1);
  expect(readFileSync(path, 'utf8')).toBe('bytes');
});

test('owed releases wait in order, survive a restart and go once done', () => {
  const folder = temporaryFolder();
  const first = mustOk(open(join(folder, 'node.db')));
  for (const id of ['h1', 'h2', 'h1']) mustOk(first.queueRelease(holdId(id)));
  mustOk(first.releaseTried(holdId('h1')));
  first.close();
  const db = openDb(folder);
  expect(db.pendingReleases(10).map((r) => [r.holdId, r.attempts])).toEqual([
    ['h2', 0],
    ['h1', 1],
  ]);
  mustOk(db.releaseDone(holdId('h2')));
  mustOk(db.releaseDone(holdId('h2')));
  expect(db.pendingReleases(10)).toHaveLength(1);
});

test('a full disk is an error with its code, and nothing half-done stays', () => {
  const folder = temporaryFolder();
  const db = mustOk(open(join(folder, 'node.db')));
  attach(db);
  db.close();
  const raw = new Sqlite(join(folder, 'node.db'));
  const used = raw.pragma('page_count', { simple: true }) as number;
  raw.close();
  const full = openDb(folder);
  full.limitPages(used + 8);
  const capture = newJob(full, vm, 'c1');
  mustOk(full.begin(vm, capture, clearing));
  const bits = new Uint8Array(128).map((_, i) => i + 1);
  const selected = { pageCount: pageCount(1024), bits };
  mustOk(full.recordSet(capture, { selected, zero: null }));
  const outcomes = Array.from({ length: 200 }, (_, i) =>
    full.setResult(capture, 'x'.repeat(1000 * (i + 1))),
  );
  const refusal = outcomes.find((outcome) => !outcome.ok);
  expect(refusal).toMatchObject({ error: { kind: 'node-db-io', code: 'SQLITE_FULL' } });
  expect(full.getJob(capture)?.step).toBe('recorded');
  full.limitPages(1 << 30);
  finish(full, 'c1');
});

test('a 64 GiB guest’s ledger is joined and stored without stalling the daemon', () => {
  const count = pageCount(16 * 1024 * 1024);
  const bits = new Uint8Array(count / 8).map((_, i) => (i * 2654435761) >>> 11);
  const dense = { pageCount: count, bits };
  joinSets({ selected: dense, zero: null }, null);
  const db = openDb();
  const vm64 = { vmId: vm, socketPath: '/x', pid: 1, startTimeTicks: 1n, dialect: 'e2b' };
  const more = { trackingMode: 'dirty', launchParent: [], trackedSinceLaunch: true };
  mustOk(db.attachVm({ ...vm64, ...more, imageBytes: bytes(count * 4096) }));
  for (const [name, selected] of [
    ['sparse', emptyBitmap(count)],
    ['dense', dense],
  ] as const) {
    selected.bits[77_777] = 1;
    newJob(db, vm, name);
    mustOk(db.begin(vm, c(name), clearing));
    const start = performance.now();
    mustOk(db.recordSet(c(name), { selected, zero: null }));
    const took = performance.now() - start;
    console.log(`recordSet, 64 GiB guest, ${name}: ${took.toFixed(1)} ms`);
    expect(took).toBeLessThan(2000);
    mustOk(db.abort(c(name), failed));
  }
});

test('a set recorded on another thread is on the disk: files copied then have it', async () => {
  const folder = temporaryFolder();
  const db = openDb(folder);
  attach(db);
  newJob(db, vm, 'c1');
  mustOk(db.begin(vm, c('c1'), clearing));
  const fetched = { selected: pages(2, 5), zero: pages(9) };
  const joined = mustOk(db.joinSet(c('c1'), fetched));
  expect(db.ledger(vm)).toBeNull();
  expect(db.getJob(c('c1'))?.step).toBe('intended');
  expect(mustOk(await db.recordSetAsync(c('c1'), fetched))).toEqual(joined);
  const copy = temporaryFolder();
  for (const file of ['node.db', 'node.db-wal']) {
    copyFileSync(join(folder, file), join(copy, file));
  }
  const again = openDb(copy);
  expect(again.ledger(vm)).toEqual(joined);
  expect(again.getJob(c('c1'))?.step).toBe('recorded');
});
