/** A catalog with a real store: what is published has bytes that can be read. */
import { createHash, randomUUID } from 'node:crypto';
import { mkdtemp, rm, writeFile } from 'node:fs/promises';
import { fastFolder } from '../../tools/postgres-server.ts';
import { join } from 'node:path';
import pg from 'pg';
import { FileArtifactStore } from '../../src/artifact/file-store.ts';
import type { ArtifactStore, StoredArtifact } from '../../src/artifact/store.ts';
import type { Layer, NewUpload, PublishRequest } from '../../src/catalog/catalog.ts';
import type { StatementEvent } from '../../src/catalog/database.ts';
import type { CatalogConfig, OpenCatalog } from '../../src/catalog/open.ts';
import { openCatalog } from '../../src/catalog/open.ts';
import { Collector, gcDefaults } from '../../src/gc/collector.ts';
import type { GcConfig, GcReport } from '../../src/gc/collector.ts';
import { bytes, contentId, digest, layerUuid, snapshotId } from '../../src/units.ts';
import type { ContentId, LayerUuid, NodeId } from '../../src/units.ts';
import { NODE, patient, value } from '../catalog/catalogs.ts';
import { MemoryArtifactStore } from './memory-store.ts';
import type { Shape, TestDialect } from '../catalog/catalogs.ts';

export const signal = new AbortController().signal;

/** Tells who was turned away by a lock of SQLite; on PostgreSQL the server is asked. */
class LockedOut {
  #waiters: (() => void)[] = [];

  readonly note = ({ sql: text, failed }: StatementEvent): void => {
    if (!failed || text !== 'begin immediate') return;
    for (const resolve of this.#waiters.splice(0)) resolve();
  };

  next(): Promise<void> {
    return new Promise((resolve) => this.#waiters.push(resolve));
  }
}

export class World implements AsyncDisposable {
  readonly #lockedOut: LockedOut;
  readonly catalog: OpenCatalog;
  readonly store: ArtifactStore;
  readonly url: string;
  readonly folder: string;
  readonly #others: OpenCatalog[] = [];

  private constructor(
    of: Pick<World, 'catalog' | 'store' | 'url' | 'folder'>,
    lockedOut: LockedOut,
  ) {
    this.catalog = of.catalog;
    this.store = of.store;
    this.url = of.url;
    this.folder = of.folder;
    this.#lockedOut = lockedOut;
  }

  static async open(
    dialect: TestDialect,
    config: Partial<CatalogConfig> & { inMemory?: boolean } = {},
  ): Promise<World> {
    const url = await dialect.newUrl();
    const folder = await mkdtemp(join(fastFolder, 'varve-world-'));
    const lockedOut = new LockedOut();
    const onStatement = lockedOut.note;
    const catalog = value(await openCatalog({ ...patient, url, onStatement, ...config }));
    const root = join(folder, 'store');
    const store =
      config.inMemory === true
        ? new MemoryArtifactStore()
        : value(await FileArtifactStore.open({ root, node: NODE }));
    value(await catalog.registerNode({ nodeId: NODE }));
    return new World({ catalog, store, url, folder }, lockedOut);
  }

  /** The same database through another connection, as another process would have. */
  async another(config: Partial<CatalogConfig> = {}): Promise<OpenCatalog> {
    const onStatement = this.#lockedOut.note;
    const catalog = value(await openCatalog({ ...patient, url: this.url, onStatement, ...config }));
    this.#others.push(catalog);
    return catalog;
  }

  /** Until `task`, under way, waits for what another connection holds. Fails if it ends instead. */
  async untilWaiting(task: Promise<unknown>): Promise<void> {
    const ended = task.then(() => {
      throw new Error('it ended without waiting');
    });
    const waiting = this.catalog.dialect === 'sqlite' ? this.#lockedOut.next() : this.#blocked();
    await Promise.race([ended, waiting]);
  }

  /** Until the server says that a session of this database waits for a lock. */
  async #blocked(): Promise<void> {
    const client = new pg.Client({ connectionString: this.url });
    await client.connect();
    const waiting = `SELECT 1 FROM pg_stat_activity
      WHERE datname = current_database() AND wait_event_type = 'Lock'`;
    while ((await client.query(waiting)).rowCount === 0);
    await client.end();
  }

  collector(config: Partial<GcConfig> = {}, catalog: OpenCatalog = this.catalog): Collector {
    return new Collector(
      { database: catalog.database, store: this.store, name: 'test' },
      { ...gcDefaults, ...config },
    );
  }

  async collect(config: Partial<GcConfig> = {}): Promise<GcReport> {
    return value(await this.collector(config).run({}, signal));
  }

  /** The store's folder. */
  get root(): string {
    return join(this.folder, 'store');
  }

  /** Records uploads and stores their bytes, which are random. */
  async stored(
    kinds: readonly NewUpload['kind'][],
    node: NodeId = NODE,
  ): Promise<StoredArtifact[]> {
    const contents = kinds.map(() => randomUUID());
    const facts = contents.map((content, index) => ({
      kind: kinds[index] ?? 'other',
      digest: digest(`sha256:${createHash('sha256').update(content).digest('hex')}`),
      sizeBytes: bytes(Buffer.byteLength(content)),
    }));
    const named = value(await this.catalog.recordUpload({ nodeId: node, artifacts: facts }));
    for (const [index, artifact] of named.entries()) {
      const content = Buffer.from(contents[index] ?? '');
      if (this.store instanceof MemoryArtifactStore) value(this.store.putBytes(artifact, content));
      else await this.#putFile(artifact, content);
    }
    return [...named];
  }

  async #putFile(artifact: StoredArtifact, content: Uint8Array): Promise<void> {
    const sourcePath = join(this.folder, randomUUID());
    await writeFile(sourcePath, content);
    value(await this.store.put({ artifact, sourcePath, signal }));
    await rm(sourcePath, { force: true });
  }

  async prepare(shape: Shape = {}): Promise<PublishRequest> {
    const node = shape.node ?? NODE;
    const count = shape.layers ?? 1;
    const layerKinds = Array.from({ length: count }, (): NewUpload['kind'] => 'layer');
    const kinds: NewUpload['kind'][] = ['manifest', 'vm-state', ...layerKinds];
    const [manifest, vmState, ...sealed] = await this.stored(kinds, node);
    if (manifest === undefined || vmState === undefined) throw new Error('no uploads');
    let below = shape.on ?? null;
    const layers = sealed.map((artifact) => {
      const uuid = layerUuid(randomUUID());
      const layer = { uuid, predecessor: below, virtualBytes: bytes(4096), artifact };
      below = uuid;
      return layer;
    });
    return {
      snapshotId: snapshotId(randomUUID()),
      contentId: contentId(randomUUID()),
      sourceVm: shape.sourceVm ?? 'vm-1',
      nodeId: node,
      createdAtMs: shape.createdAtMs ?? 1,
      manifest,
      layers,
      heads: below === null ? [] : [{ role: 'memory', layer: below }],
      artifacts: [{ name: 'vm-state', artifact: vmState }],
      alias: shape.alias,
    };
  }

  async publish(shape: Shape = {}): Promise<PublishRequest> {
    const request = await this.prepare(shape);
    value(await this.catalog.publish(request));
    return request;
  }

  /** Every byte a content needs, whole chains included; fails the test if one is missing. */
  async readable(id: ContentId): Promise<number> {
    const content = value(await this.catalog.findContent(id));
    const objects = [content.manifest, ...content.artifacts.map(({ artifact }) => artifact)];
    for (const { layer } of content.heads) {
      const chain: readonly Layer[] = value(await this.catalog.lineage(layer));
      objects.push(...chain.map(({ artifact }) => artifact));
    }
    for (const artifact of objects) value(await this.store.verify(artifact, signal));
    return objects.length;
  }

  async objects(): Promise<string[]> {
    const keys: string[] = [];
    for await (const { key, name } of this.store.list(signal)) keys.push(key ?? name);
    return keys.sort();
  }

  /** Rows per table, to see that nothing is left. */
  async rows(): Promise<Record<string, number>> {
    const tables = [
      'alias',
      'artifact',
      'candidate_content',
      'candidate_layer',
      'content',
      'content_artifact',
      'content_head',
      'hold',
      'layer',
      'reclaim',
      'snapshot',
      'upload',
      'volume',
    ] as const;
    return await this.catalog.database.read('rows', async (tx) => {
      const counts: Record<string, number> = {};
      for (const table of tables) {
        const row = await tx.db
          .selectFrom(table)
          .select((eb) => eb.fn.countAll<number>().as('count'))
          .executeTakeFirstOrThrow();
        counts[table] = row.count;
      }
      return counts;
    });
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await Promise.all(this.#others.map((catalog) => catalog.close()));
    await this.catalog.close();
    await rm(this.folder, { recursive: true, force: true });
  }
}

export const layersOf = (request: PublishRequest): LayerUuid[] =>
  request.layers.map(({ uuid }) => uuid);

/** Rows of each table that a catalog has once nothing is protected and everything is collected. */
export const nothingLeft = {
  artifact: 0,
  candidate_content: 0,
  candidate_layer: 0,
  content: 0,
  content_artifact: 0,
  content_head: 0,
  layer: 0,
  reclaim: 0,
  upload: 0,
};
