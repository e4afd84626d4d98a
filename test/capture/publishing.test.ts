/** Publishes that come late, twice, out of turn, or under a name that is gone. */
import { mkdir, rename, writeFile } from 'node:fs/promises';
import { dirname } from 'node:path';
import { expect, test, vi } from 'vitest';
import { parseArtifactKey } from '../../src/artifact/store.ts';
import type { Catalog } from '../../src/catalog/catalog.ts';
import type { OpenCatalog } from '../../src/catalog/open.ts';
import { Collector } from '../../src/gc/collector.ts';
import type { LocalLayer } from '../../src/lineage/layers.queries.ts';
import { NodeDb } from '../../src/lineage/node-db.ts';
import { err } from '../../src/result.ts';
import { bytes, digest as toDigest, nodeId, snapshotId } from '../../src/units.ts';
import {
  allHashes,
  firstDifference,
  Harness,
  never,
  valueOf,
  expectWholeManifest,
  objects,
  until,
} from './harness.ts';

const eager = { pipeline: { publish: { retry_min: '10ms', retry_max: '100ms' } } };

type Publish = Catalog['publish'];

/** The real catalog, but for some of its calls. */
const withCalls =
  (calls: (real: OpenCatalog) => Partial<Catalog>) =>
  (real: OpenCatalog): Catalog => ({ ...real, ...calls(real) });

const withPublish = (
  publish: (real: OpenCatalog, ...call: Parameters<Publish>) => ReturnType<Publish>,
) => withCalls((real) => ({ publish: (...call) => publish(real, ...call) }));

async function collect(harness: Harness): Promise<number> {
  const { database } = harness.catalog;
  const collector = new Collector({ database, store: harness.store, name: 'test' });
  return valueOf(await collector.run({}, never)).objectsReclaimed;
}

test('a publish that is tried under new names writes nothing that the store has already', async () => {
  let refusals = 1;
  await using harness = await Harness.make(
    eager,
    {},
    {
      around: withPublish((real, request) =>
        refusals-- > 0
          ? Promise.resolve(err({ kind: 'upload-missing' as const, message: 'gone', subject: '' }))
          : real.publish(request),
      ),
    },
  );
  await using vm = await harness.vm({ dialect: 'e2b', memoryMib: 16 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  await harness.published(vmId);
  const kinds: string[] = [];
  for await (const { key, sizeBytes } of harness.store.list(never)) {
    const named = key === null ? undefined : parseArtifactKey(key);
    if (key === null || named === undefined) continue;
    kinds.push(named.kind);
    valueOf(await harness.store.verify({ ...named, key, sizeBytes }, never));
  }
  expect(kinds.filter((kind) => kind === 'manifest')).toHaveLength(2);
});

test('what an earlier life had stored is given up when the catalog is back, with no publish at all', async () => {
  const seen = { isAway: false, refused: 0, settled: 0 };
  const away = err({ kind: 'catalog-unavailable' as const, message: 'not now' });
  await using harness = await Harness.make(
    eager,
    {},
    {
      around: withCalls((real) => ({
        abandonUploads: async (...call) => {
          if (seen.isAway) {
            seen.refused += 1;
            return away;
          }
          const abandoned = await real.abandonUploads(...call);
          seen.settled += 1;
          return abandoned;
        },
      })),
    },
  );
  const node = nodeId('test-node');
  const digest = toDigest(`sha256:${'ab'.repeat(32)}`);
  const artifacts = [{ kind: 'layer' as const, digest, sizeBytes: bytes(4096) }];
  await until(() => seen.settled > 0);
  valueOf(await harness.catalog.recordUpload({ nodeId: node, artifacts }));
  await harness.stop();
  seen.isAway = true;
  await harness.start();
  await until(() => seen.refused >= 3);
  expect(valueOf(await harness.catalog.listUploads(node))).toHaveLength(1);
  seen.isAway = false;
  await until(() => seen.settled !== 1);
  expect(valueOf(await harness.catalog.listUploads(node))).toEqual([]);
  // Told once, not at each try.
  expect(harness.warnings).toHaveLength(1);
});

test.each(
  // Of a newer program, damaged, without this node: the daemon stays up and goes on trying.
  ['catalog-newer', 'catalog-corrupt', 'node-forgotten', 'node-unknown'] as const,
)('a committed capture waits until a catalog is as it was: %s', async (kind) => {
  let refusals = 0;
  await using harness = await Harness.make(
    eager,
    {},
    {
      around: withPublish(async (real, request) => {
        refusals += 1;
        if (refusals < 3) return err({ kind, message: 'changed', subject: '' });
        return await real.publish(request);
      }),
    },
  );
  await using vm = await harness.vm({ dialect: 'aenv', memoryMib: 32 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  const result = await harness.published(vmId, { resumeAfter: 'commit' });
  expect(refusals).toBe(3);
  await expectWholeManifest(harness, result.snapshotId);
});

/** What befalls the first try of a publish, by its layer, and what mends it before the second. */
interface Mishap {
  readonly kind: string;
  readonly befalls: (harness: Harness, layer: LocalLayer) => Promise<void>;
  readonly mends: (harness: Harness, layer: LocalLayer) => Promise<void>;
}

const nothing = (): Promise<void> => Promise.resolve();
const away = (path: string): string => `${path}.away`;

const mishaps: Readonly<Record<string, Mishap>> = {
  'its layer file is not to be found': {
    kind: 'source-missing',
    befalls: (_harness, { path }) => rename(path, away(path)),
    mends: (_harness, { path }) => rename(away(path), path),
  },
  'the store is not mounted': {
    kind: 'store-io',
    befalls: ({ store }) => rename(store.root, away(store.root)),
    mends: ({ store }) => rename(away(store.root), store.root),
  },
  'other bytes are under its name': {
    kind: 'artifact-exists',
    befalls: async ({ catalog, store }) => {
      for (const { key } of valueOf(await catalog.listUploads(nodeId('test-node')))) {
        await mkdir(dirname(store.localPath(key)), { recursive: true });
        await writeFile(store.localPath(key), 'torn');
      }
    },
    mends: nothing,
  },
};

test.each(Object.entries(mishaps))('a publish is tried again when %s', async (_, mishap) => {
  const failures: string[] = [];
  const seen = { isNamed: false, isMended: false };
  await using harness: Harness = await Harness.make(
    eager,
    { publishFailed: (_capture, { kind }) => failures.push(kind) },
    {
      around: withCalls((real) => ({
        recordUpload: async (...call) => {
          const answer = await real.recordUpload(...call);
          const [layer] = harness.nodeDb.localLayers();
          if (!seen.isNamed && layer !== undefined) await mishap.befalls(harness, layer);
          seen.isNamed = true;
          return answer;
        },
        show: async (...call) => {
          const [layer] = harness.nodeDb.localLayers();
          if (!seen.isMended && failures.length === 1 && layer !== undefined) {
            seen.isMended = true;
            await mishap.mends(harness, layer);
          }
          return await real.show(...call);
        },
      })),
    },
  );
  await using vm = await harness.vm({ dialect: 'e2b', memoryMib: 16 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  const result = await harness.published(vmId, { resumeAfter: 'commit' });
  expect(failures).toEqual([mishap.kind]);
  await expectWholeManifest(harness, result.snapshotId);
  expect(valueOf(await harness.catalog.listUploads(nodeId('test-node')))).toEqual([]);
});

test('a publish that can never be says what to do, and its pages are in the next snapshot', async () => {
  const failures: { kind: string; retryable: boolean }[] = [];
  let refusals = 1;
  await using harness = await Harness.make(
    eager,
    { publishFailed: (_capture, failure) => failures.push(failure) },
    {
      around: withPublish((real, request) =>
        refusals-- > 0
          ? Promise.resolve(err({ kind: 'snapshot-conflict', message: 'taken', subject: '' }))
          : real.publish(request),
      ),
    },
  );
  await using vm = await harness.vm({ dialect: 'e2b', memoryMib: 16 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  const left = await harness.capture(vmId);
  expect(left).toMatchObject({
    status: 'committed',
    failure: { message: expect.stringContaining('capture the VM once more') as string },
  });
  expect(failures).toMatchObject([{ kind: 'snapshot-conflict', retryable: false }]);
  const { snapshotId: next } = await harness.published(vmId);
  await expectWholeManifest(harness, next);
  const head = harness.nodeDb.memoryChain(vmId)?.layers.at(-1)?.uuid;
  if (head === undefined) throw new Error('the VM has no layer');
  expect(valueOf(await harness.catalog.lineage(head))).toHaveLength(2);
});

test('a capture whose layer a later one published first is published on it', async () => {
  let late: string | undefined;
  const published: string[] = [];
  await using harness = await Harness.make(
    eager,
    {},
    {
      around: withPublish(async (real, request) => {
        late ??= request.snapshotId;
        if (request.snapshotId === late && published.length === 0) {
          return err({ kind: 'catalog-unavailable', message: 'not now' });
        }
        const answer = await real.publish(request);
        if (answer.ok) published.push(request.snapshotId);
        return answer;
      }),
    },
  );
  await using vm = await harness.vm({ dialect: 'aenv', memoryMib: 32 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  await vm.run({ pages: { firstPage: 2000, pageCount: 50 }, value: 1 });
  await vm.pause();
  const firstImage = await allHashes(vm);
  await vm.resume();
  const first = await harness.startCapture(vmId, { resumeAfter: 'commit' });
  for await (const event of harness.service.watch(first.captureId, never)) {
    if (event.type === 'status' && event.capture.failure !== null) break;
  }
  await vm.run({ pages: { firstPage: 3000, pageCount: 5 }, value: 2 });
  const second = await harness.published(vmId);
  const left = await harness.service.waitFor(first.captureId, never);
  expect(left).toMatchObject({ status: 'published', failure: null });
  expect(published).toEqual([second.snapshotId, left.result?.snapshotId]);

  await using copy = await harness.restore(left.result?.snapshotId ?? '');
  const differing = (await allHashes(copy)).filter((hash, page) => hash !== firstImage[page]);
  // The guest's own mailbox moved between the hashes and the pause.
  expect(differing.length).toBeLessThan(10);
  for (const { snapshotId: id } of [second, left.result ?? second]) {
    await expectWholeManifest(harness, id);
  }
  expect(valueOf(await harness.catalog.listUploads(nodeId('test-node')))).toEqual([]);
  await collect(harness);
  // Two layers, two VM states, two manifests: what the first had stored for itself is gone again.
  expect(await objects(harness)).toBe(6);
});

test('an alias that is taken between the check and the publish is told, and costs no snapshot', async () => {
  let tries = 0;
  await using harness = await Harness.make(
    eager,
    {},
    {
      around: withPublish(async (real, request) => {
        if (request.alias === 'golden') {
          const [other] = valueOf(await real.list({})).snapshots;
          if (other !== undefined) await real.addAlias('golden', snapshotId(other.id));
        }
        if (request.alias !== 'silver') return await real.publish(request);
        // Published without its name, and the answer lost: the next try finds the snapshot there.
        tries += 1;
        valueOf(await real.publish({ ...request, alias: undefined }));
        return err({ kind: 'catalog-unavailable', message: 'the answer is lost' });
      }),
    },
  );
  await using vm = await harness.vm({ dialect: 'aenv', memoryMib: 32 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  const other = await harness.published(vmId);
  const told = {
    status: 'published',
    failure: null,
    result: { alias: null, aliasProblem: { kind: 'alias-taken' } },
  };
  const views = [];
  for (const alias of ['golden', 'silver']) {
    const view = await harness.capture(vmId, { alias });
    expect(view).toMatchObject(told);
    valueOf(await harness.catalog.resolve(view.result?.snapshotId ?? ''));
    views.push(view);
  }
  expect(tries).toBe(1);
  expect(valueOf(await harness.catalog.resolve('golden')).snapshot.id).toBe(other.snapshotId);
  await harness.stop();
  await harness.start();
  for (const { captureId } of views) {
    expect(harness.service.getCapture(captureId)).toMatchObject(told);
  }
});

test('a parent that was retired and collected under a running VM is published again with its child', async () => {
  await using harness = await Harness.make(eager);
  await using vm = await harness.vm({ dialect: 'aenv', memoryMib: 32 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  await vm.run({ pages: { firstPage: 2000, pageCount: 50 }, value: 1 });
  const base = await harness.published(vmId);
  await vm.run({ pages: { firstPage: 2500, pageCount: 5 }, value: 2 });
  const middle = await harness.published(vmId);
  for (const { snapshotId: id } of [base, middle]) valueOf(await harness.catalog.retire(id));
  expect(await collect(harness)).toBe(6);
  expect(await objects(harness)).toBe(0);
  await vm.run({ pages: { firstPage: 3000, pageCount: 5 }, value: 3 });
  const expected = await allHashes(vm);
  const next = await harness.published(vmId);
  expect(next.predecessor).toBe(middle.layer);
  await using copy = await harness.restore(next.snapshotId);
  expect(firstDifference(await allHashes(copy), expected)).toBeNull();
  await expectWholeManifest(harness, next.snapshotId);
  expect(valueOf(await harness.catalog.listUploads(nodeId('test-node')))).toEqual([]);
});

test('a publish is tried again where node.db fails for a moment beside it', async () => {
  await using harness = await Harness.make(eager);
  await using vm = await harness.vm({ dialect: 'aenv', memoryMib: 16 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  const base = await harness.published(vmId);
  valueOf(await harness.catalog.retire(base.snapshotId));
  await collect(harness);

  // The catalog has forgotten the parent, and node.db cannot note that yet.
  const io = { kind: 'node-db-io', message: 'not now' } as const;
  using marked = vi.spyOn(NodeDb.prototype, 'markUnpublished').mockReturnValueOnce(err(io));
  const next = await harness.published(vmId, { resumeAfter: 'commit' });
  expect(marked).toHaveBeenCalledTimes(2);
  await expectWholeManifest(harness, next.snapshotId);

  // What to wait for cannot be read.
  using read = vi.spyOn(NodeDb.prototype, 'layersToPublish').mockImplementationOnce(() => {
    throw Object.assign(new Error('not now'), { code: 'SQLITE_IOERR' });
  });
  await harness.published(vmId, { resumeAfter: 'commit' });
  expect(read.mock.results[0]?.type).toBe('throw');
});

test('a capture that an earlier life committed is published although node.db fails once', async () => {
  const seen = { away: true };
  const around = withPublish(async (real, request) =>
    seen.away
      ? err({ kind: 'catalog-unavailable', message: 'not now' })
      : await real.publish(request),
  );
  await using harness = await Harness.make(eager, {}, { around });
  await using vm = await harness.vm({ dialect: 'aenv', memoryMib: 16 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  const { captureId } = await harness.startCapture(vmId, { resumeAfter: 'commit' });
  for await (const event of harness.service.watch(captureId, never)) {
    if (event.type === 'status' && event.capture.failure !== null) break;
  }
  await harness.stop();
  seen.away = false;
  using read = vi.spyOn(NodeDb.prototype, 'layersToPublish').mockImplementationOnce(() => {
    throw Object.assign(new Error('not now'), { code: 'SQLITE_IOERR' });
  });
  await harness.start();
  await until(() => harness.service.getCapture(captureId)?.status === 'published');
  expect(read.mock.results[0]?.type).toBe('throw');
});

test('a daemon that stops while the catalog is asked about a publish stops, and tries again later', async () => {
  const gate = { asked: (): void => undefined, answer: (): void => undefined };
  const asked = new Promise<void>((resolve) => (gate.asked = resolve));
  const answered = new Promise<void>((resolve) => (gate.answer = resolve));
  const around = withCalls((real) => ({
    show: async (name) => {
      gate.asked();
      await answered;
      return real.show(name);
    },
  }));
  await using harness = await Harness.make({}, {}, { around });
  await using vm = await harness.vm({ dialect: 'aenv', memoryMib: 32 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  const { captureId } = await harness.startCapture(vmId, { resumeAfter: 'commit' });
  await asked;
  const stopped = harness.service.close();
  gate.answer();
  await stopped;
  expect(harness.service.getCapture(captureId)?.status).toBe('committed');
  await harness.stop();
  await harness.start();
  await until(() => harness.service.getCapture(captureId)?.status === 'published');
});
