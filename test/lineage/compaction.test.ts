import { randomBytes, randomUUID } from 'node:crypto';
import { existsSync, mkdirSync, readdirSync, rmSync, statSync, truncateSync } from 'node:fs';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { systemClock } from '../../src/clock.ts';
import { LayerStack } from '../../src/layer/layer-stack.ts';
import { ZEROED_ROW } from '../../src/layer/format.ts';
import { LayerWriter } from '../../src/layer/layer-writer.ts';
import { Compactor } from '../../src/lineage/compaction.ts';
import type { CompactionReport, MergeRun } from '../../src/lineage/compaction.ts';
import { checkedMerge } from '../../src/lineage/merge-run.ts';
import type { NodeDb } from '../../src/lineage/node-db.ts';
import type { FailureDetail } from '../../src/result.ts';
import { bytes, captureId, layerUuid, snapshotId, vmId } from '../../src/units.ts';
import { attach, clearing, failed, mustFail, mustOk, newJob } from './fixtures.ts';
import { openDb, pages, temporaryFolder } from './fixtures.ts';

const vm = vmId('vm-1');
const c = captureId;
const PAGES = 1024;
const never = new AbortController().signal;
const merge = checkedMerge({ compression: 'none', blockBytes: 4096 });

/** A VM in short: an image in memory, and captures of what changed, by the protocol. */
class Subject {
  readonly folder: string;
  readonly db: NodeDb;
  readonly image = Buffer.alloc(PAGES * 4096);
  #captures = 0;

  constructor() {
    this.folder = temporaryFolder();
    this.db = openDb(this.folder);
    attach(this.db);
  }

  begin(): string {
    const id = `c${(this.#captures += 1)}`;
    newJob(this.db, vm, id);
    mustOk(this.db.begin(vm, c(id), clearing));
    return id;
  }

  /** Rewrites some pages, zeroes one, and captures them. */
  async finish(id: string, written: readonly number[], zeroed: number): Promise<void> {
    for (const page of written) randomBytes(4096).copy(this.image, page * 4096);
    this.image.fill(0, zeroed * 4096, (zeroed + 1) * 4096);
    const parentUuid = this.db.getJob(c(id))?.parentUuid ?? null;
    const rows = written
      .filter((page) => page !== zeroed)
      .map((page) => [BigInt(page * 4096), 4096n, BigInt(page * 4096)]);
    if (parentUuid !== null) rows.push([BigInt(zeroed * 4096), 4096n, ZEROED_ROW]);
    mustOk(this.db.recordSet(c(id), { selected: pages(...written), zero: pages(zeroed) }));
    await using writer = await LayerWriter.create({
      ...{ path: join(this.folder, `${id}.lsmt`), uuid: layerUuid(randomUUID()), parentUuid },
      ...{ virtualBytes: bytes(PAGES * 4096), compression: 'none', blockBytes: 4096 },
    });
    await writer.append({ slab: this.image, rows: BigUint64Array.from(rows.flat()) });
    mustOk(this.db.sealed(c(id), await writer.seal(never)));
    mustOk(this.db.commit(c(id)));
  }

  async capture(publish = true): Promise<string> {
    const id = this.begin();
    const first = (this.#captures * 37) % (PAGES - 20);
    await this.finish(id, [first, first + 1, first + 7, 3], first + 8);
    if (publish) mustOk(this.db.published(c(id), snapshotId(`s-${id}`)));
    return id;
  }

  /** The chain, opened with its order checked, reads as the image. */
  async check(): Promise<void> {
    const chain = this.db.memoryChain(vm);
    const paths = chain?.layers.map((layer) => layer.path) ?? [];
    await using stack = mustOk(await LayerStack.open(paths, { order: 'check' }));
    const read = new Uint8Array(PAGES * 4096);
    mustOk(await stack.read(bytes(0), read));
    expect(Buffer.compare(this.image, read)).toBe(0);
  }

  files(): string[] {
    return readdirSync(this.folder).filter((name) => name.includes('.lsmt'));
  }
}

interface Log {
  readonly reports: CompactionReport[];
  readonly failures: FailureDetail[];
}

function compactor(subject: Subject, maxChain: number, run: MergeRun = merge) {
  const log: Log = { reports: [], failures: [] };
  const made = new Compactor({
    db: subject.db,
    merge: run,
    layersFolder: subject.folder,
    maxChain,
    clock: systemClock,
    onCompacted: (report) => log.reports.push(report),
    onFailed: (_vm, failure) => log.failures.push(failure),
  });
  return { made, log };
}

test('sixty captures stay within max_chain, read exactly, and leave no file behind', async () => {
  const subject = new Subject();
  const { made, log } = compactor(subject, 8);
  await using compacting = made;
  for (let i = 0; i < 60; i += 1) {
    await compacting.admit(vm, never);
    await subject.capture();
    compacting.check(vm);
    expect(subject.db.memoryChain(vm)?.depth).toBeLessThanOrEqual(8);
    if (i % 3 === 0) await compacting.idle(vm);
  }
  await compacting.idle(vm);
  await subject.check();
  expect(log.failures).toEqual([]);
  expect(log.reports.length).toBeGreaterThan(3);
  expect(subject.files()).toHaveLength(subject.db.localLayers().length);
  expect(subject.db.leases()).toEqual([]);
  expect(subject.db.pendingCompactions()).toEqual([]);
});

test('K1 captures that commit during a merge are copied on top; every header stays true', async () => {
  const subject = new Subject();
  for (let i = 0; i < 6; i += 1) await subject.capture();
  let merges = 0;
  const busy: MergeRun = async (request) => {
    merges += 1;
    if (merges <= 3) await subject.capture();
    return merge(request);
  };
  const { made, log } = compactor(subject, 8, busy);
  await using compacting = made;
  compacting.check(vm);
  await compacting.idle(vm);
  expect(log.failures).toEqual([]);
  expect(log.reports).toMatchObject([{ depthBefore: 6, depthAfter: 4, layersMerged: 9 }]);
  expect(merges).toBe(4);
  await subject.check();
});

test('K2 a swap waits for the capture that has an intent, and takes its layer along', async () => {
  const subject = new Subject();
  for (let i = 0; i < 6; i += 1) await subject.capture();
  const id = subject.begin();
  const { made, log } = compactor(subject, 8);
  await using compacting = made;
  compacting.check(vm);
  const waits = (): Promise<boolean> =>
    compacting.admit(vm, AbortSignal.abort()).then(
      () => false,
      () => true,
    );
  while (!(await waits())) await new Promise((resolve) => setImmediate(resolve));
  expect(log.reports).toEqual([]);
  await subject.finish(id, [9, 10], 11);
  compacting.check(vm);
  await compacting.admit(vm, never);
  expect(log.reports).toMatchObject([{ depthBefore: 6, depthAfter: 2 }]);
  await subject.check();
});

test('K2 a swap is refused where the head is another one or a capture has an intent', async () => {
  const subject = new Subject();
  await subject.capture();
  const { head } = mustOk(subject.db.beginCompaction(vm, 'k'));
  expect(mustFail(subject.db.beginCompaction(vm, 'k2')).kind).toBe('compaction-running');
  const other = { covers: layerUuid(randomUUID()), layers: [] };
  expect(mustFail(subject.db.swapChain('k', other)).kind).toBe('chain-moved');
  subject.begin();
  const now = { covers: head, layers: [] };
  expect(mustFail(subject.db.swapChain('k', now))).toMatchObject({ kind: 'capture-running' });
});

test('K3 what waits to be published keeps its old chain; the next publish has the new layers', async () => {
  const subject = new Subject();
  for (let i = 0; i < 5; i += 1) await subject.capture();
  const waiting = await subject.capture(false);
  const before = subject.db.layersToPublish(c(waiting)).map((layer) => layer.path);
  const { made, log } = compactor(subject, 8);
  await using compacting = made;
  compacting.check(vm);
  await compacting.idle(vm);
  expect(log.reports).toHaveLength(1);
  expect(before.every((path) => existsSync(path))).toBe(true);
  expect(subject.db.layersToPublish(c(waiting)).map((layer) => layer.path)).toEqual(before);
  const next = await subject.capture(false);
  expect(subject.db.layersToPublish(c(next))).toHaveLength(2);
  expect(mustOk(subject.db.published(c(next), snapshotId('next'))).step).toBe('published');
  mustOk(subject.db.published(c(waiting), snapshotId('old')));
  await subject.check();
});

test('K4 a merge that fails leaves no file, the captures go on, and the next commit tries again', async () => {
  const subject = new Subject();
  for (let i = 0; i < 6; i += 1) await subject.capture();
  let fails = true;
  const flaky: MergeRun = async (request) => {
    const made = await merge(request);
    return fails ? { ok: false, error: failed } : made;
  };
  const { made, log } = compactor(subject, 8, flaky);
  await using compacting = made;
  compacting.check(vm);
  await compacting.idle(vm);
  expect(log.failures).toEqual([failed]);
  expect(subject.files()).toHaveLength(6);
  expect(subject.db.pendingCompactions()).toEqual([]);
  fails = false;
  await compacting.admit(vm, never);
  await subject.capture();
  compacting.check(vm);
  await compacting.idle(vm);
  expect(log.reports).toMatchObject([{ depthBefore: 7, depthAfter: 1 }]);
  await subject.check();
});

test('a damaged layer is never merged under a fresh digest', async () => {
  const subject = new Subject();
  for (let i = 0; i < 6; i += 1) await subject.capture();
  const victim = subject.db.memoryChain(vm)?.layers[2]?.path ?? '';
  truncateSync(victim, statSync(victim).size - 512);
  const { made, log } = compactor(subject, 8);
  await using compacting = made;
  compacting.check(vm);
  await compacting.idle(vm);
  expect(log.reports).toEqual([]);
  expect(log.failures).toHaveLength(1);
  expect(log.failures[0]?.message).toContain(victim);
  expect(subject.db.memoryChain(vm)?.depth).toBe(6);
});

test('closing in the middle of a merge ends it without a file', async () => {
  const subject = new Subject();
  for (let i = 0; i < 6; i += 1) await subject.capture();
  const { made, log } = compactor(subject, 8, async (request) => {
    void made.close();
    return merge(request);
  });
  made.check(vm);
  await made.close();
  expect(log.reports.length + subject.files().length).toBeGreaterThan(0);
  await subject.check();
  expect(subject.files()).toHaveLength(subject.db.localLayers().length);
});

test('a merged layer whose file cannot be removed keeps no later compaction from its turn', async () => {
  const subject = new Subject();
  for (let i = 0; i < 6; i += 1) await subject.capture();
  const stuck = subject.db.memoryChain(vm)?.layers.at(-1)?.path ?? '';
  const { made, log } = compactor(subject, 8, async (request) => {
    const merged = await merge(request);
    if (existsSync(stuck) && statSync(stuck).isFile()) {
      rmSync(stuck);
      // A folder is no file: it cannot be unlinked.
      mkdirSync(stuck);
    }
    return merged;
  });
  await using compacting = made;
  for (let round = 1; round <= 2; round += 1) {
    compacting.check(vm);
    await compacting.idle(vm);
    expect(log.reports).toHaveLength(round);
    while ((subject.db.memoryChain(vm)?.depth ?? 0) < 6) await subject.capture();
  }
  expect(log.failures).toEqual([]);
  expect(mustOk(subject.db.condemnLayers())[0]?.unlink).toBe(stuck);
  await subject.check();
});

test('a merge that fails with a bug is told, and the next compaction has its turn', async () => {
  const subject = new Subject();
  for (let i = 0; i < 6; i += 1) await subject.capture();
  let merges = 0;
  const { made, log } = compactor(subject, 8, (request) => {
    if ((merges += 1) === 1) throw new Error('a bug');
    return merge(request);
  });
  await using compacting = made;
  compacting.check(vm);
  await compacting.idle(vm);
  expect(log.failures).toEqual([{ kind: 'internal', message: 'Error: a bug' }]);
  compacting.check(vm);
  await compacting.idle(vm);
  expect(log.reports).toHaveLength(1);
});

test('what a failed merge leaves and cannot be removed keeps no later compaction away', async () => {
  const subject = new Subject();
  for (let i = 0; i < 6; i += 1) await subject.capture();
  let merges = 0;
  const { made, log } = compactor(subject, 8, (request) => {
    if ((merges += 1) > 1) return merge(request);
    mkdirSync(request.path);
    return Promise.resolve({ ok: false, error: failed });
  });
  await using compacting = made;
  compacting.check(vm);
  await compacting.idle(vm);
  expect(log.failures.map(({ kind }) => kind)).toEqual(['layer-io', failed.kind]);
  compacting.check(vm);
  await compacting.idle(vm);
  expect(log.reports).toHaveLength(1);
});
