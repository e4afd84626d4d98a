import { spawnSync } from 'node:child_process';
import { existsSync, readdirSync, rmSync, statSync } from 'node:fs';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import type { CaptureJob } from '../../src/lineage/jobs.queries.ts';
import type { NodeDb } from '../../src/lineage/node-db.ts';
import { planRecovery, recover } from '../../src/lineage/recovery.ts';
import type { RecoveryHooks, VmIdentity } from '../../src/lineage/recovery.ts';
import { ok } from '../../src/result.ts';
import { captureId, snapshotId, vmId } from '../../src/units.ts';
import { attach, captureTo, clearing, failed, finish } from './fixtures.ts';
import { mustOk, newJob, openDb, pagesIn, temporaryFolder } from './fixtures.ts';

const vm = vmId('vm-1');
const c = captureId;
const dist = join(process.cwd(), 'dist/src');

/** A daemon that runs one capture by the protocol and kills itself where it is told to. */
const script = `
  import { writeFileSync, renameSync } from 'node:fs';
  import { NodeDb } from '${dist}/lineage/node-db.js';
  import { systemClock } from '${dist}/clock.js';
  const { folder, dieAt, clearsOnRead } = JSON.parse(process.argv[1]);
  const must = (r) => { if (!r.ok) throw new Error(JSON.stringify(r.error)); return r.value; };
  const at = (step) => { if (step === dieAt) process.kill(process.pid, 'SIGKILL'); };
  const db = must(NodeDb.open(folder + '/node.db', systemClock));
  const vm = 'vm-1', id = 'c2', path = folder + '/layer';
  must(db.createJob({ captureId: id, vmId: vm, requestJson: '{}', createdAtMs: 2 }));
  at('created');
  const intent = must(db.begin(vm, id, { clearsOnRead, forgetsCommitted: false, bytesIn: 'process',
    advance: true, scratchPaths: [path, path + '.partial'] }));
  at('intended');
  must(db.markPaused(vm, id));
  at('paused');
  const bits = new Uint8Array(128); bits[0] = 0b110;
  at('fetched');
  must(db.recordSet(id, { selected: { pageCount: 1024, bits }, zero: null }));
  at('recorded');
  writeFileSync(path + '.partial', 'x'.repeat(8192));
  at('written');
  renameSync(path + '.partial', path);
  at('renamed');
  must(db.sealed(id, { uuid: '11111111-1111-4111-8111-111111111111', parentUuid: intent.memoryParent.head,
    path, digest: 'sha256:' + 'a'.repeat(64), sizeBytes: 8192, virtualBytes: 4194304 },
    { publishJson: '{"plan":1}' }));
  at('sealed');
  must(db.commit(id));
  at('committed');
  must(db.published(id, 's2'));
  at('published');
  must(db.clearPaused(vm, id));
  at('resumed');
`;

function dieAt(step: string, clearsOnRead = true): string {
  const folder = temporaryFolder();
  {
    const db = openDb(folder);
    attach(db);
    captureTo(db, vm, 'c1', { selected: [0] });
    finish(db, 'c1');
    mustOk(db.published(c('c1'), snapshotId('s1')));
    db.close();
  }
  const input = JSON.stringify({ folder, dieAt: step, clearsOnRead });
  const child = spawnSync(process.execPath, ['--input-type=module', '-e', script, input], {
    encoding: 'utf8',
  });
  expect(child.signal, child.stderr).toBe('SIGKILL');
  return folder;
}

interface Seen {
  readonly resumed: string[];
  readonly published: CaptureJob[];
}

function hooks(folder: string, seen: Seen, identity: VmIdentity = 'same'): RecoveryHooks {
  return {
    identity: () => Promise.resolve(identity),
    wasResumed: () => false,
    fileBytes: (path) => Promise.resolve(existsSync(path) ? statSync(path).size : null),
    temporaryFiles: () =>
      Promise.resolve(
        readdirSync(folder)
          .filter((name) => name.endsWith('.partial'))
          .map((name) => join(folder, name)),
      ),
    resume: (record) => {
      seen.resumed.push(record.vmId);
      return Promise.resolve(ok(undefined));
    },
    removeFile: (path) => {
      rmSync(path, { force: true });
      return Promise.resolve(ok(undefined));
    },
    publish: (job) => void seen.published.push(job),
  };
}

const never = new AbortController().signal;

async function restart(folder: string, identity: VmIdentity = 'same') {
  const db = openDb(folder);
  const seen: Seen = { resumed: [], published: [] };
  const report = await recover(db, hooks(folder, seen, identity), never);
  expect(report.failed).toEqual([]);
  return { db, seen };
}

/** What the next capture must hold beside its own page 9, and whether it widens. */
function next(db: NodeDb): { selected: number[]; widen: boolean } {
  newJob(db, vm, 'c3');
  const intent = mustOk(db.begin(vm, c('c3'), clearing));
  const selected = { pageCount: 1024 as never, bits: new Uint8Array(128) };
  selected.bits[1] = 0b10;
  const widened = intent.widen !== null;
  const sets = mustOk(db.recordSet(c('c3'), { selected, zero: null, widened }));
  return { selected: pagesIn(sets.selected), widen: widened };
}

const pausedSteps = ['paused', 'fetched', 'recorded', 'written', 'renamed', 'sealed', 'committed'];

for (const step of ['created', 'intended', ...pausedSteps, 'published', 'resumed']) {
  test(`a daemon killed when ${step}: the VM runs, no partial layer stays, nothing is lost`, async () => {
    const folder = dieAt(step);
    const { db, seen } = await restart(folder);
    expect(seen.resumed).toEqual([...pausedSteps, 'published'].includes(step) ? [vm] : []);
    expect(db.getVm(vm)?.pausedBy).toBeNull();
    const committed = ['sealed', 'committed', 'published', 'resumed'].includes(step);
    expect(existsSync(join(folder, 'layer'))).toBe(committed);
    expect(existsSync(join(folder, 'layer.partial'))).toBe(false);
    expect(db.getVm(vm)?.epoch).toBe(committed ? 3 : 2);
    const toPublish = ['sealed', 'committed'].includes(step);
    expect(seen.published.map((job) => job.publishJson)).toEqual(toPublish ? ['{"plan":1}'] : []);
    if (toPublish) mustOk(db.published(c('c2'), snapshotId('s2')));
    const lost = ['intended', 'paused', 'fetched'].includes(step);
    const carried = ['recorded', 'written', 'renamed'].includes(step);
    expect(next(db)).toEqual({ selected: carried ? [1, 2, 9] : [9], widen: lost });
  });
}

test('a killed capture from a source that does not clear loses nothing and does not widen', async () => {
  const { db } = await restart(dieAt('fetched', false));
  expect(next(db)).toEqual({ selected: [9], widen: false });
});

test('a daemon killed during recovery recovers by the same plan again', async () => {
  const folder = dieAt('written');
  const db = openDb(folder);
  const seen: Seen = { resumed: [], published: [] };
  const dead = new Error('killed here');
  const dying = { ...hooks(folder, seen), removeFile: () => Promise.reject(dead) };
  await expect(recover(db, dying, never)).rejects.toBe(dead);
  db.close();
  const { db: again, seen: later } = await restart(folder);
  expect([...seen.resumed, ...later.resumed]).toEqual([vm]);
  expect(next(again).selected).toEqual([1, 2, 9]);
});

test('a VM whose process is gone or another one now is never sent a resume', async () => {
  for (const identity of ['exited', 'replaced'] as const) {
    const { db, seen } = await restart(dieAt('recorded'), identity);
    expect(seen.resumed).toEqual([]);
    expect(db.getVm(vm)?.pausedBy).toBeNull();
  }
});

test('a sealed layer whose file is short or missing aborts instead of being committed', async () => {
  const folder = dieAt('sealed');
  rmSync(join(folder, 'layer'));
  const { db, seen } = await restart(folder);
  expect(seen.published).toEqual([]);
  expect(db.getJob(c('c2'))).toMatchObject({
    step: 'aborted',
    failure: { kind: 'daemon-restarted' },
  });
  expect(next(db).selected).toEqual([1, 2, 9]);
});

test('a VM whose resume fails keeps its mark and is tried at the next start', async () => {
  const folder = dieAt('recorded');
  const db = openDb(folder);
  const seen: Seen = { resumed: [], published: [] };
  const refusing = {
    ...hooks(folder, seen),
    resume: () => Promise.resolve({ ok: false as const, error: failed }),
  };
  const report = await recover(db, refusing, never);
  expect(report.failed.map(({ action }) => action.kind)).toEqual(['resume-vm']);
  expect(db.getVm(vm)?.pausedBy).toBe('c2');
  db.close();
  const { seen: later } = await restart(folder);
  expect(later.resumed).toEqual([vm]);
});

test('the plan resumes before anything else and publishes oldest first', () => {
  const db = openDb();
  attach(db);
  for (const id of ['c1', 'c2']) {
    captureTo(db, vm, id, { selected: [1] });
    finish(db, id);
  }
  attach(db, { id: 'vm-2', pid: 9 });
  captureTo(db, vmId('vm-2'), 'c3', { selected: [1] });
  mustOk(db.markPaused(vmId('vm-2'), c('c3')));
  const state = {
    vms: db.listVms(),
    unfinished: db.unfinishedJobs(),
    compactions: db.pendingCompactions(),
  };
  const facts = {
    identity: new Map([[vmId('vm-2'), 'same' as const]]),
    resumed: new Set<never>(),
    fileBytes: new Map<string, number>(),
    temporaryFiles: ['/layers/x.partial'],
  };
  expect(planRecovery(state, facts).map(({ kind }) => kind)).toEqual([
    'resume-vm',
    'end-needs',
    'abort-capture',
    'publish-capture',
    'publish-capture',
    'remove-file',
    'delete-layers',
  ]);
});
