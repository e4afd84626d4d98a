import { expect, test } from 'vitest';
import { captureId, snapshotId, vmId } from '../../src/units.ts';
import {
  attach,
  captureTo,
  chain,
  clearing,
  forgetting,
  failed,
  finish,
  keeping,
} from './fixtures.ts';
import { layer, mustFail, mustOk, newJob, openDb, pages, pagesIn } from './fixtures.ts';
import { PAGES } from './fixtures.ts';

const vm = vmId('vm-1');
const c = captureId;

test('two captures: S1 holds A, S2 holds A and B; a failure between changes neither', () => {
  const db = openDb();
  attach(db);
  expect(captureTo(db, vm, 'c1', { selected: [1, 2] }).selected).toEqual([1, 2]);
  const s1 = finish(db, 'c1');
  expect(captureTo(db, vm, 'c2', { selected: [3] }).selected).toEqual([3]);
  mustOk(db.abort(c('c2'), failed));
  expect(captureTo(db, vm, 'c3', { selected: [4] }).selected).toEqual([3, 4]);
  const s2 = finish(db, 'c3');
  expect(db.memoryChain(vm)?.layers.map((l) => l.uuid)).toEqual([s1.uuid, s2.uuid]);
  expect(captureTo(db, vm, 'c4', { selected: [5] }).selected).toEqual([5]);
});

test('I1 a second capture of a VM is refused with the id of the one that runs', () => {
  const db = openDb();
  attach(db);
  newJob(db, vm, 'c1');
  const again = db.createJob({ captureId: c('c2'), vmId: vm, requestJson: '{}', createdAtMs: 2 });
  expect(mustFail(again)).toMatchObject({ kind: 'capture-running', runningCaptureId: 'c1' });
  mustOk(db.abort(c('c1'), failed));
  newJob(db, vm, 'c3');
});

test('I2 the ledger is the union of all fetched sets, whatever is aborted in between', () => {
  const db = openDb();
  attach(db);
  const selected: number[] = [];
  for (let i = 0; i < 20; i += 1) {
    selected.push(i * 7);
    const got = captureTo(db, vm, `c${i}`, { selected: [i * 7] });
    expect(got.selected).toEqual(selected);
    expect(pagesIn(db.ledger(vm)?.selected)).toEqual(selected);
    mustOk(db.abort(c(`c${i}`), failed));
  }
});

test('I2 a further round of pre-copy adds to the ledger and takes nothing out', () => {
  const db = openDb();
  attach(db);
  captureTo(db, vm, 'c1', { selected: [1, 2], zero: [9] });
  const round = mustOk(db.recordSet(c('c1'), { selected: pages(2, 3), zero: null }));
  expect(pagesIn(round.selected)).toEqual([1, 2, 3, 9]);
});

test('I3 commit moves the parent, the epoch and the ledger in one step, and only once', () => {
  const db = openDb();
  attach(db);
  captureTo(db, vm, 'c1', { selected: [1] });
  const made = finish(db, 'c1');
  const after = db.getVm(vm);
  expect(after).toMatchObject({ epoch: 2, memoryHead: made.uuid, launchHead: null });
  expect(db.ledger(vm)).toBeNull();
  expect(mustOk(db.commit(c('c1'))).step).toBe('committed');
  expect(db.getVm(vm)).toEqual(after);
});

test('I3 without advance the parent and the ledger stay, so the set only grows', () => {
  const db = openDb();
  const launch = chain(2);
  attach(db, { launchParent: launch });
  const source = { ...clearing, advance: false };
  captureTo(db, vm, 'c1', { selected: [1], source });
  const first = finish(db, 'c1');
  expect(first.parentUuid).toBe(launch[1]?.uuid);
  expect(captureTo(db, vm, 'c2', { selected: [2], source }).selected).toEqual([1, 2]);
  expect(finish(db, 'c2').parentUuid).toBe(launch[1]?.uuid);
  expect(db.getVm(vm)).toMatchObject({ epoch: 3, memoryHead: launch[1]?.uuid });
});

test('I4 a set lost between read and record widens every later begin until one is recorded', () => {
  const db = openDb();
  attach(db);
  for (const id of ['c1', 'c2']) {
    newJob(db, vm, id);
    const intent = mustOk(db.begin(vm, c(id), clearing));
    expect(intent.widen === null).toBe(id === 'c1');
    mustOk(db.abort(c(id), failed));
  }
  newJob(db, vm, 'c3');
  const intent = mustOk(db.begin(vm, c('c3'), keeping));
  expect(intent.widen?.reason).toMatch(/capture c2 ended before/);
  const thin = { selected: pages(1), zero: null };
  expect(mustFail(db.recordSet(c('c3'), thin)).kind).toBe('set-not-widened');
  mustOk(db.recordSet(c('c3'), { ...thin, widened: true }));
  mustOk(db.abort(c('c3'), failed));
  expect(db.getVm(vm)?.lostReason).toBeNull();
  expect(captureTo(db, vm, 'c4', { selected: [2] }).selected).toEqual([1, 2]);
});

test('I4 nothing is lost where the source does not clear, or was certainly not read', () => {
  const db = openDb();
  attach(db);
  newJob(db, vm, 'c1');
  mustOk(db.begin(vm, c('c1'), keeping));
  mustOk(db.abort(c('c1'), failed));
  newJob(db, vm, 'c2');
  expect(mustOk(db.begin(vm, c('c2'), clearing)).widen).toBeNull();
  mustOk(db.abort(c('c2'), failed, { fetchAttempted: false }));
  newJob(db, vm, 'c3');
  mustOk(db.abort(c('c3'), failed));
  newJob(db, vm, 'c4');
  expect(mustOk(db.begin(vm, c('c4'), clearing)).widen).toBeNull();
});

test('I4 a VM attached while running widens for sources that clear, and only for them', () => {
  const db = openDb();
  attach(db, { trackedSinceLaunch: false });
  captureTo(db, vm, 'c1', { selected: [1], source: keeping });
  mustOk(db.abort(c('c1'), failed));
  newJob(db, vm, 'c2');
  expect(mustOk(db.begin(vm, c('c2'), clearing)).widen?.reason).toBe('attached while running');
});

test('I4 a VM whose VMM may have forgotten committed epochs widens when attached while running', () => {
  const db = openDb();
  attach(db, { trackedSinceLaunch: false });
  newJob(db, vm, 'c1');
  expect(mustOk(db.begin(vm, c('c1'), forgetting)).widen?.reason).toBe('attached while running');
});

test.each([
  ['reading', clearing],
  ['committing', forgetting],
])(
  'I4 a process whose tracking was cleared by %s before it was attached again widens',
  (_, source) => {
    const db = openDb();
    attach(db);
    captureTo(db, vm, 'c1', { selected: [1], source });
    finish(db, 'c1');
    mustOk(db.detachVm(vm));
    attach(db, { id: 'vm-2' });
    newJob(db, vmId('vm-2'), 'c2');
    const intent = mustOk(db.begin(vmId('vm-2'), c('c2'), keeping));
    expect(intent.widen?.reason).toMatch(/was read before/);
    expect(intent.memoryParent).toBeNull();
  },
);

test('I5 pages whose bytes were only in the memory file of an aborted epoch widen the next', () => {
  const db = openDb();
  attach(db);
  const source = { ...clearing, bytesIn: 'file' } as const;
  captureTo(db, vm, 'c1', { selected: [1], source });
  mustOk(db.abort(c('c1'), failed));
  newJob(db, vm, 'c2');
  expect(mustOk(db.begin(vm, c('c2'), source)).widen?.reason).toMatch(/only in its memory file/);
  mustOk(db.recordSet(c('c2'), { selected: pages(1, 2, 3), zero: null, widened: true }));
  finish(db, 'c2');
  newJob(db, vm, 'c3');
  expect(mustOk(db.begin(vm, c('c3'), source)).widen).toBeNull();
});

test('I6 an abort at any step leaves parent, epoch and ledger as the record left them', () => {
  const db = openDb();
  attach(db);
  captureTo(db, vm, 'c1', { selected: [1] });
  const base = finish(db, 'c1');
  captureTo(db, vm, 'c2', { selected: [2] });
  mustOk(db.sealed(c('c2'), layer(base.uuid)));
  mustOk(db.abort(c('c2'), failed));
  expect(db.getVm(vm)).toMatchObject({ epoch: 2, memoryHead: base.uuid });
  expect(pagesIn(db.ledger(vm)?.selected)).toEqual([2]);
  expect(db.getJob(c('c2'))).toMatchObject({ step: 'aborted', failure: failed });
  expect(mustOk(db.abort(c('c2'), { kind: 'later', message: 'x' })).failure).toEqual(failed);
});

test('I7 nobody begins on a VM that a capture paused and has not resumed', () => {
  const db = openDb();
  attach(db);
  newJob(db, vm, 'c1');
  expect(mustFail(db.markPaused(vm, c('c1'))).kind).toBe('capture-step');
  mustOk(db.begin(vm, c('c1'), clearing));
  mustOk(db.markPaused(vm, c('c1')));
  mustOk(db.recordSet(c('c1'), { selected: pages(1), zero: null }));
  finish(db, 'c1');
  const next = { captureId: c('c2'), vmId: vm, requestJson: '{}', createdAtMs: 2 };
  expect(mustFail(db.createJob(next))).toMatchObject({ runningCaptureId: 'c1' });
  expect(mustFail(db.detachVm(vm)).kind).toBe('capture-running');
  expect(mustFail(db.clearPaused(vm, c('c9'))).kind).toBe('capture-running');
  mustOk(db.clearPaused(vm, c('c1')));
  mustOk(db.clearPaused(vm, c('c1')));
  mustOk(db.createJob(next));
});

test('I8 a layer that does not sit on the intent’s parent is refused', () => {
  const db = openDb();
  attach(db);
  captureTo(db, vm, 'c1', { selected: [1] });
  finish(db, 'c1');
  captureTo(db, vm, 'c2', { selected: [2] });
  expect(mustFail(db.sealed(c('c2'), layer(null))).kind).toBe('layer-mismatch');
  expect(db.getJob(c('c2'))?.step).toBe('recorded');
});

test('I9 a chain at 255 layers is refused at begin, before any pause', () => {
  const db = openDb();
  attach(db, { launchParent: chain(254) });
  captureTo(db, vm, 'c1', { selected: [1] });
  finish(db, 'c1');
  newJob(db, vm, 'c2');
  const refusal = mustFail(db.begin(vm, c('c2'), clearing));
  expect(refusal).toMatchObject({ kind: 'chain-too-deep', depth: 256 });
  expect(db.getJob(c('c2'))?.step).toBe('created');
  expect(db.getVm(vm)?.pausedBy).toBeNull();
});

test('I10 a capture’s lease holds its parent, then its own chain, then nothing', () => {
  const db = openDb();
  attach(db);
  captureTo(db, vm, 'c1', { selected: [1] });
  const base = finish(db, 'c1');
  mustOk(db.published(c('c1'), snapshotId('s1')));
  expect(db.leases()).toEqual([]);
  captureTo(db, vm, 'c2', { selected: [2] });
  expect(db.leases()).toMatchObject([{ holderId: 'c2', layer: base.uuid }]);
  const top = finish(db, 'c2');
  expect(db.leases()).toMatchObject([{ holderId: 'c2', layer: top.uuid }]);
  expect(db.layersToPublish(c('c2')).map((l) => l.uuid)).toEqual([top.uuid]);
  mustOk(db.published(c('c2'), snapshotId('s2')));
  expect(db.leases()).toEqual([]);
  expect(db.layersToPublish(c('c2'))).toEqual([]);
});

test('a publish that waits keeps every unpublished layer below it', () => {
  const db = openDb();
  attach(db);
  for (const id of ['c1', 'c2', 'c3']) {
    captureTo(db, vm, id, { selected: [1] });
    finish(db, id);
  }
  expect(db.layersToPublish(c('c3'))).toHaveLength(3);
  mustOk(db.published(c('c3'), snapshotId('s3')));
  expect(db.layersToPublish(c('c1'))).toEqual([]);
  expect(db.unfinishedJobs().map((job) => job.captureId)).toEqual(['c1', 'c2']);
});

test('a removed page is zero until it is written, and read again where a later fetch is silent', () => {
  const db = openDb();
  attach(db);
  expect(captureTo(db, vm, 'c1', { selected: [1], zero: [2, 3, 4] })).toEqual({
    selected: [1],
    zero: [2, 3, 4],
  });
  mustOk(db.abort(c('c1'), failed));
  expect(captureTo(db, vm, 'c2', { selected: [3], zero: [1, 4] })).toEqual({
    selected: [2, 3],
    zero: [1, 4],
  });
});

test('a set of another page count, or a malformed one, is refused and changes nothing', () => {
  const db = openDb();
  attach(db);
  newJob(db, vm, 'c1');
  mustOk(db.begin(vm, c('c1'), clearing));
  const short = { pageCount: pages().pageCount, bits: new Uint8Array(PAGES / 8 - 8) };
  for (const selected of [short, { ...pages(), pageCount: (PAGES + 64) as never }]) {
    expect(mustFail(db.recordSet(c('c1'), { selected, zero: null })).kind).toBe('layout-changed');
  }
  const other = { pageCount: (PAGES - 64) as never, bits: new Uint8Array((PAGES - 64) / 8) };
  const grown = db.recordSet(c('c1'), { selected: other, zero: null });
  expect(mustFail(grown)).toMatchObject({ kind: 'layout-changed' });
  expect(db.ledger(vm)).toBeNull();
  expect(db.getJob(c('c1'))?.step).toBe('intended');
});

test('every event outside the transition table is refused and changes nothing', () => {
  const events = {
    begin: (db: ReturnType<typeof openDb>, id: string) => db.begin(vm, c(id), clearing),
    recordSet: (db: ReturnType<typeof openDb>, id: string) =>
      db.recordSet(c(id), { selected: pages(1), zero: null }),
    sealed: (db: ReturnType<typeof openDb>, id: string) => db.sealed(c(id), layer(null)),
    commit: (db: ReturnType<typeof openDb>, id: string) => db.commit(c(id)),
    published: (db: ReturnType<typeof openDb>, id: string) => db.published(c(id), snapshotId('s')),
    abort: (db: ReturnType<typeof openDb>, id: string) => db.abort(c(id), failed),
  };
  const table = {
    created: ['begin', 'abort'],
    intended: ['recordSet', 'abort'],
    recorded: ['recordSet', 'sealed', 'abort'],
    sealed: ['commit', 'abort'],
    committed: ['commit', 'published'],
    published: ['commit', 'published'],
    aborted: ['abort'],
  };
  const way = ['begin', 'recordSet', 'sealed', 'commit', 'published'] as const;
  for (const [step, allowed] of Object.entries(table)) {
    for (const event of Object.keys(events) as (keyof typeof events)[]) {
      const db = openDb();
      attach(db);
      newJob(db, vm, 'c1');
      if (step === 'aborted') mustOk(events.abort(db, 'c1'));
      else
        for (const e of way)
          if (db.getJob(c('c1'))?.step !== step) expect(events[e](db, 'c1').ok).toBe(true);
      const before = [db.getJob(c('c1')), db.getVm(vm)];
      const outcome = events[event](db, 'c1');
      expect(outcome.ok, `${event} in ${step}`).toBe(allowed.includes(event));
      if (outcome.ok) continue;
      expect(outcome.error.kind).toBe('capture-step');
      expect([db.getJob(c('c1')), db.getVm(vm)]).toEqual(before);
    }
  }
});
