/**
 * The catalog with 10,000 and 1,000,000 retained layers: publish, resolve and collection times on
 * both dialects, against a catalog of snapshot-to-layer pairs in the same database. The two sizes
 * are measured by turns, so that what else the machine does meets both. Budgets: DESIGN §11.
 */
import { createHash } from 'node:crypto';
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import type { ArtifactStore } from '../src/artifact/store.ts';
import type { PublishRequest } from '../src/catalog/catalog.ts';
import { openCatalog } from '../src/catalog/open.ts';
import type { OpenCatalog } from '../src/catalog/open.ts';
import { Collector, gcDefaults } from '../src/gc/collector.ts';
import { reclaimBatch } from '../src/gc/reclaim.ts';
import { ok } from '../src/result.ts';
import type { FailureDetail, Result } from '../src/result.ts';
import { bytes, contentId, digest, layerUuid, nodeId, snapshotId } from '../src/units.ts';
import { TestPostgres, postgresMissing } from '../tools/postgres-server.ts';
import { digestOf, loadCatalog, randomOf, uuidOf } from './catalog-load.ts';
import type { Loaded } from './catalog-load.ts';
import { createNaive, naiveCollect, naivePublish, naiveResolve } from './catalog-naive.ts';
import { lockWaits, sizesOf } from './catalog-stats.ts';

export interface CatalogSizes {
  readonly layers: readonly number[];
  readonly operations: number;
  readonly retired: number;
  readonly publishers: number;
}

export const sizes = {
  smoke: { layers: [320, 3200], operations: 20, retired: 40, publishers: 4 },
  full: { layers: [10_000, 1_000_000], operations: 500, retired: 1000, publishers: 16 },
} as const satisfies Record<string, CatalogSizes>;

type Print = (line: string) => void;
const NODE = nodeId('bench');
const seed = 20_261_130;

interface Subject {
  readonly url: string;
  readonly catalog: OpenCatalog;
  readonly loaded: Loaded;
  readonly random: () => number;
  readonly times: Map<string, number[]>;
  retries: number;
}

function value<T>(result: Result<T, FailureDetail>): T {
  if (result.ok) return result.value;
  throw new Error(`${result.error.kind}: ${result.error.message}`);
}

export interface CatalogBenchOptions {
  readonly dialects?: readonly ('sqlite' | 'postgres')[] | undefined;
  /** Called between loading and measuring, for each dialect. */
  readonly loaded?: (() => Promise<void>) | undefined;
}

export async function catalogBench(
  size: CatalogSizes,
  print: Print,
  options: CatalogBenchOptions = {},
): Promise<void> {
  const { dialects = ['sqlite', 'postgres'], loaded } = options;
  if (dialects.includes('sqlite')) {
    const folder = await mkdtemp(join(tmpdir(), 'varve-bench-'));
    try {
      const urls = size.layers.map((count) => `sqlite:${join(folder, `${count}.db`)}`);
      await benchDialect({ name: 'sqlite', urls, loaded }, size, print);
    } finally {
      await rm(folder, { recursive: true, force: true });
    }
  }
  if (!dialects.includes('postgres')) return;
  const missing = postgresMissing();
  if (missing !== null) {
    print(`postgres: skipped, ${missing}`);
    return;
  }
  await using server = await TestPostgres.start({ durable: true });
  const urls = await Promise.all(size.layers.map(() => server.newDatabase()));
  await benchDialect({ name: 'postgres', urls, loaded }, size, print);
}

async function benchDialect(
  of: { name: string; urls: readonly string[]; loaded: CatalogBenchOptions['loaded'] },
  size: CatalogSizes,
  print: Print,
): Promise<void> {
  const { name, urls, loaded } = of;
  const subjects: Subject[] = [];
  for (const [index, url] of urls.entries()) {
    subjects.push(await openSubject(url, size.layers[index] ?? 0));
  }
  await loaded?.();
  for (let count = 0; count < size.operations; count += 1) {
    for (const subject of subjects) await oneRound(subject);
  }
  await benchGc(subjects, size);
  report(name, subjects, print);
  if (name === 'postgres') await concurrent(subjects, size, print);
  for (const subject of subjects) {
    print(`${name} ${subject.loaded.layers} layers: ${await sizesOf(subject.catalog)}`);
    await subject.catalog.close();
  }
}

async function openSubject(url: string, layers: number): Promise<Subject> {
  const retried = { count: 0 };
  const catalog = value(
    await openCatalog({
      url,
      poolMax: 16,
      onTransaction: ({ attempts }) => {
        retried.count += attempts - 1;
      },
    }),
  );
  value(await catalog.registerNode({ nodeId: NODE }));
  await createNaive(catalog.database);
  const loaded = await loadCatalog(url, layers, { node: NODE, seed });
  const random = randomOf(seed + layers);
  return {
    url,
    catalog,
    loaded,
    random,
    times: new Map(),
    get retries() {
      return retried.count;
    },
  };
}

async function timed<T>(subject: Subject, what: string, work: () => Promise<T>): Promise<T> {
  const startNs = process.hrtime.bigint();
  const result = await work();
  const times = subject.times.get(what) ?? [];
  times.push(Number(process.hrtime.bigint() - startNs) / 1e6);
  subject.times.set(what, times);
  return result;
}

/** Chains of 32 take one more layer; deeper ones than 33 do not arise. */
function baseOf({ loaded, random }: Subject): Loaded['heads'][number] {
  const head = loaded.heads[Math.floor(random() * loaded.heads.length)];
  if (head === undefined) throw new Error('nothing is loaded');
  return head;
}

async function oneRound(subject: Subject): Promise<void> {
  const { catalog, random } = subject;
  const own = await prepare(subject, baseOf(subject).layer);
  value(await timed(subject, 'publish, low reuse', () => catalog.publish(own)));
  const template = templateOf(subject);
  const shared = await prepare(subject, template.layer);
  value(await timed(subject, 'publish, shared template', () => catalog.publish(shared)));
  const naiveBase = baseOf(subject).snapshot;
  await timed(subject, 'publish, all pairs', () =>
    naivePublish(catalog.database, random, naiveBase, NODE),
  );
  const other = baseOf(subject).snapshot;
  value(await timed(subject, 'resolve, low reuse', () => catalog.resolve(other)));
  value(await timed(subject, 'resolve, shared template', () => catalog.resolve(template.snapshot)));
  await timed(subject, 'resolve and chain', async () => {
    const { content } = value(await catalog.resolve(other));
    for (const { layer } of content.heads) value(await catalog.lineage(layer));
  });
  await timed(subject, 'resolve and chain, all pairs', () => naiveResolve(catalog.database, other));
}

/** What every start of the shared-template load uses: the head of one whole chain. */
const templateOf = (subject: Subject): Loaded['heads'][number] =>
  subject.loaded.heads[3] ?? baseOf(subject);

async function prepare({ catalog, random }: Subject, on: string): Promise<PublishRequest> {
  const upload = (kind: 'layer' | 'manifest' | 'vm-state') => ({
    kind,
    digest: digest(digestOf(random)),
    sizeBytes: bytes(1_048_576),
  });
  const artifacts = [upload('layer'), upload('manifest'), upload('vm-state')];
  const [layer, manifest, vmState] = value(await catalog.recordUpload({ nodeId: NODE, artifacts }));
  if (layer === undefined || manifest === undefined || vmState === undefined) throw new Error();
  const uuid = layerUuid(uuidOf(random));
  return {
    snapshotId: snapshotId(uuidOf(random)),
    contentId: contentId(uuidOf(random)),
    sourceVm: 'vm-1',
    nodeId: NODE,
    createdAtMs: 1_800_000_000_000,
    manifest,
    layers: [
      {
        uuid,
        predecessor: layerUuid(on),
        virtualBytes: bytes(2 ** 30),
        artifact: layer,
      },
    ],
    heads: [{ role: 'memory', layer: uuid }],
    artifacts: [{ name: 'vm-state', artifact: vmState }],
  };
}

/** Only the catalog is measured: deleting files is the filesystem's time. */
const noBytes: Pick<ArtifactStore, 'delete'> = {
  delete: async (_key, fence) => ok((await fence()) ? 'deleted' : 'fenced'),
};

/**
 * In ten parts, by turns, of which the median counts: `retired` snapshots with one layer of their
 * own each.
 */
async function benchGc(subjects: readonly Subject[], size: CatalogSizes): Promise<void> {
  const parts = 10;
  const signal = new AbortController().signal;
  for (let part = 0; part < parts; part += 1) {
    for (const subject of subjects) {
      const { catalog } = subject;
      for (let count = 0; count < size.retired / parts; count += 1) {
        const request = await prepare(subject, baseOf(subject).layer);
        value(await catalog.publish(request));
        value(await catalog.retire(request.snapshotId));
      }
      const store = noBytes as ArtifactStore;
      const deps = { database: catalog.database, store, name: 'bench' };
      const collector = new Collector(deps, gcDefaults);
      const done = await timed(subject, 'collect', () => collector.run({}, signal));
      if (value(done).layersCondemned !== size.retired / parts) throw new Error('wrong count');
      await opponentGc(subject, size.retired / parts);
    }
  }
}

/** Forgets as many of its own snapshots; the objects are then reclaimed as ours are. */
async function opponentGc(subject: Subject, retired: number): Promise<void> {
  const { catalog, random } = subject;
  const { database } = catalog;
  const snapshots: string[] = [];
  while (snapshots.length < retired) {
    snapshots.push(await naivePublish(database, random, baseOf(subject).snapshot, NODE));
  }
  const deps = { database, store: noBytes as ArtifactStore };
  const signal = new AbortController().signal;
  await timed(subject, 'collect, all pairs', async () => {
    if ((await naiveCollect(database, snapshots)) !== retired) throw new Error('wrong count');
    while ((await reclaimBatch(deps, gcDefaults, signal)).claimed > 0);
  });
}

const percentile = (times: readonly number[], share: number): number =>
  [...times].sort((a, b) => a - b)[Math.min(times.length - 1, Math.floor(times.length * share))] ??
  Number.NaN;

function report(name: string, subjects: readonly Subject[], print: Print): void {
  const [small, large] = subjects;
  if (small === undefined || large === undefined) return;
  const counts = subjects.map(({ loaded }) => loaded.layers);
  for (const what of small.times.keys()) {
    const [a, b] = subjects.map(({ times }) => times.get(what) ?? []);
    if (a === undefined || b === undefined) continue;
    if (what.startsWith('collect')) {
      const [few, many] = [a.length * percentile(a, 0.5), b.length * percentile(b, 0.5)];
      const ratio = (many / few).toFixed(2);
      print(
        `${name} ${what}: ${few.toFixed(0)} ms at ${counts[0]} layers, ` +
          `${many.toFixed(0)} ms at ${counts[1]}: × ${ratio}`,
      );
      continue;
    }
    const text = [a, b].map(
      (times) => `${percentile(times, 0.5).toFixed(2)} / ${percentile(times, 0.99).toFixed(2)} ms`,
    );
    const ratio = (percentile(b, 0.99) / percentile(a, 0.99)).toFixed(2);
    print(
      `${name} ${what} (p50 / p99): ${text[0]} at ${counts[0]} layers, ` +
        `${text[1]} at ${counts[1]}: p99 × ${ratio}`,
    );
  }
  const work = createHash('sha256').update(subjects.map(({ random }) => random()).join());
  print(`${name} checksum of the work: ${work.digest('hex').slice(0, 16)}`);
}

/** Many publishers at once, each on a base of its own and all on one template. */
async function concurrent(
  subjects: readonly Subject[],
  size: CatalogSizes,
  print: Print,
): Promise<void> {
  for (const subject of subjects) {
    for (const load of ['low reuse', 'shared template']) {
      const before = subject.retries;
      const each = Math.ceil(size.operations / size.publishers);
      const startNs = process.hrtime.bigint();
      const what = `concurrent ${load}`;
      await using waits = await lockWaits(subject.url);
      await Promise.all(
        Array.from({ length: size.publishers }, async () => {
          for (let count = 0; count < each; count += 1) {
            const base = load === 'low reuse' ? baseOf(subject) : templateOf(subject);
            const request = await prepare(subject, base.layer);
            value(await timed(subject, what, () => subject.catalog.publish(request)));
          }
        }),
      );
      const seconds = Number(process.hrtime.bigint() - startNs) / 1e9;
      const times = subject.times.get(what) ?? [];
      const rate = Math.round((each * size.publishers) / seconds);
      print(
        `postgres concurrent, ${subject.loaded.layers} layers, ${size.publishers} publishers, ${load}: ` +
          `${rate}/s, p50 / p99 ` +
          `${percentile(times, 0.5).toFixed(2)} / ${percentile(times, 0.99).toFixed(2)} ms, ` +
          `${waits.text()}, ${subject.retries - before} run again`,
      );
    }
  }
}
