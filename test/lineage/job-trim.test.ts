import { join } from 'node:path';
import { expect, onTestFinished, test } from 'vitest';
import type { Clock } from '../../src/clock.ts';
import { keepTrimming } from '../../src/lineage/job-trim.ts';
import { NodeDb } from '../../src/lineage/node-db.ts';
import { captureId, snapshotId } from '../../src/units.ts';
import { attach, captureTo, failed, finish, mustOk, newJob, temporaryFolder } from './fixtures.ts';

/** A clock that is set by hand; whoever sleeps waits for `turn`. */
class HandClock implements Clock {
  now = 0;
  sleeps = 0;
  #wake: () => void = () => undefined;

  nowMs(): number {
    return this.now;
  }
  monotonicNs(): bigint {
    return BigInt(this.now) * 1_000_000n;
  }
  sleep(_ms: number, signal: AbortSignal): Promise<void> {
    this.sleeps += 1;
    return new Promise((resolve, reject) => {
      this.#wake = resolve;
      signal.addEventListener('abort', () => reject(signal.reason as Error), { once: true });
    });
  }
  turn(): void {
    this.#wake();
  }
}

function open(clock: Clock): NodeDb {
  const db = mustOk(NodeDb.open(join(temporaryFolder(), 'node.db'), clock));
  onTestFinished(() => db.close());
  return db;
}

const ids = (db: NodeDb): string[] => db.listJobs({ limit: 10_000 }).map((job) => job.captureId);

test('only what ended long ago is forgotten: never an active, unpublished or paused capture', () => {
  const clock = new HandClock();
  const db = open(clock);
  const vm = attach(db).vmId;
  captureTo(db, vm, 'published', { selected: [1] });
  finish(db, 'published');
  mustOk(db.published(captureId('published'), snapshotId('s1')));
  captureTo(db, vm, 'aborted', { selected: [1] });
  mustOk(db.abort(captureId('aborted'), failed));
  captureTo(db, vm, 'unpublished', { selected: [2] });
  finish(db, 'unpublished');
  captureTo(db, vm, 'active', { selected: [3] });
  const stuck = attach(db, { id: 'vm-2', pid: 7 }).vmId;
  captureTo(db, stuck, 'stuck', { selected: [4] });
  mustOk(db.markPaused(stuck, captureId('stuck')));
  mustOk(db.abort(captureId('stuck'), failed));
  clock.now = 1_000;
  const recent = attach(db, { id: 'vm-3', pid: 8 }).vmId;
  mustOk(db.abort(newJob(db, recent, 'recent'), failed));

  expect(mustOk(db.trimJobs(0, 100))).toBe(0);
  expect(mustOk(db.trimJobs(1_000, 100))).toBe(2);
  expect(ids(db).sort()).toEqual(['active', 'recent', 'stuck', 'unpublished']);
  mustOk(db.clearPaused(stuck, captureId('stuck')));
  expect(mustOk(db.trimJobs(1_000, 100))).toBe(1);
  expect(db.getJob(captureId('unpublished'))?.step).toBe('committed');
  expect(db.unfinishedJobs()).toHaveLength(2);
});

test('trimming goes on by turns, in bounded transactions, until it is stopped', async () => {
  const clock = new HandClock();
  const db = open(clock);
  const vm = attach(db, { id: 'vm-1' }).vmId;
  for (let i = 0; i < 1_200; i += 1) mustOk(db.abort(newJob(db, vm, `c${i}`), failed));
  const batches: number[] = [];
  const counted = {
    trimJobs: (beforeMs: number, limit: number) => {
      const trimmed = db.trimJobs(beforeMs, limit);
      batches.push(mustOk(trimmed));
      return trimmed;
    },
  };
  const stop = new AbortController();
  const onFailed = (): never => expect.unreachable();
  const options = { db: counted, clock, retentionMs: 5_000, onFailed };
  clock.now = 5_000;
  const ended = keepTrimming(options, stop.signal);
  while (clock.sleeps < 1) await new Promise((resolve) => setImmediate(resolve));
  expect(batches).toEqual([0]);
  clock.now = 5_001;
  clock.turn();
  while (clock.sleeps < 2) await new Promise((resolve) => setImmediate(resolve));
  expect(batches).toEqual([0, 500, 500, 200]);
  expect(ids(db)).toEqual([]);
  stop.abort(new Error('enough'));
  await ended;
});
