/**
 * Opens a catalog: picks the dialect, checks or applies migrations, and hands out the typed face.
 */
import { sql } from 'kysely';
import { systemClock } from '../clock.ts';
import type { Clock } from '../clock.ts';
import { Failure, err, ok } from '../result.ts';
import type { FailureDetail, Result } from '../result.ts';
import { migrations as ownMigrations } from '../../migrations/index.ts';
import type { Migration } from '../../migrations/index.ts';
import type { Catalog } from './catalog.ts';
import * as check from './check.ts';
import { findContent } from './content.queries.ts';
import { Database } from './database.ts';
import type { DatabaseOptions, DialectPort, StatementEvent } from './database.ts';
import type { TransactionEvent, Tx } from './database.ts';
import type { CatalogError } from './errors.ts';
import { forgetNode } from './forget.ts';
import { countOpenHolds, selectHolds } from './hold.queries.ts';
import * as holds from './holds.ts';
import { findLayers } from './layer.queries.ts';
import { migrate, migrationStatus } from './migrator.ts';
import { selectNodes } from './node.queries.ts';
import * as nodes from './nodes.ts';
import { openPostgres } from './postgres.ts';
import { publish } from './publish.ts';
import { reclaimBacklog } from './reclaim.queries.ts';
import * as snapshots from './snapshots.ts';
import { openSqlite } from './sqlite.ts';
import { selectUploads } from './upload.queries.ts';
import { findVolume, selectVolumes } from './volume.queries.ts';

export interface CatalogConfig {
  /** `sqlite:/absolute/path`, or `postgres://user@host/database`. */
  readonly url: string;
  /** `apply` (default): missing migrations are applied. `check`: they are an error. */
  readonly migrations?: 'apply' | 'check' | undefined;
  /** PostgreSQL connections. Default 8. */
  readonly poolMax?: number | undefined;
  /** Until a connection attempt counts as failed. Default 2000. */
  readonly connectTimeoutMs?: number | undefined;
  /** PostgreSQL: longest statement. Default 15000. */
  readonly statementTimeoutMs?: number | undefined;
  /** Longest time a transaction is retried on locks and conflicts. Default 10000. */
  readonly lockTimeoutMs?: number | undefined;
  readonly onStatement?: ((event: StatementEvent) => void) | undefined;
  readonly onTransaction?: ((event: TransactionEvent) => void) | undefined;
  readonly clock?: Clock | undefined;
  readonly random?: (() => number) | undefined;
  /** Only for tests of the migrator. */
  readonly migrationList?: readonly Migration[] | undefined;
}

/** A catalog, and the database under it for `src/gc`, which shares its tables. */
export interface OpenCatalog extends Catalog {
  readonly database: Database;
}

export async function openCatalog(
  config: CatalogConfig,
): Promise<Result<OpenCatalog, CatalogError>> {
  return await edge(async () => {
    const database = await openDatabase(config);
    try {
      const list = config.migrationList ?? ownMigrations;
      if (config.migrations === 'check') await requireCurrent(database, list);
      else await migrate(database, list);
      return face(database);
    } catch (error) {
      await database.close();
      throw error;
    }
  });
}

/** Without looking at migrations. Throws `Failure<CatalogError>`. */
export async function openDatabase(config: CatalogConfig): Promise<Database> {
  const patience = {
    clock: config.clock ?? systemClock,
    random: config.random ?? Math.random,
    lockTimeoutMs: config.lockTimeoutMs ?? 10_000,
  };
  const port = await openPort(config, patience);
  return new Database(port, { ...patience, onTransaction: config.onTransaction });
}

async function openPort(
  config: CatalogConfig,
  patience: Pick<DatabaseOptions, 'clock' | 'random' | 'lockTimeoutMs'>,
): Promise<DialectPort> {
  const { url, onStatement } = config;
  if (url.startsWith('sqlite:')) {
    return await openSqlite(url.slice('sqlite:'.length), { ...patience, onStatement });
  }
  if (url.startsWith('postgres://') || url.startsWith('postgresql://')) {
    return openPostgres(url, {
      poolMax: config.poolMax ?? 8,
      connectTimeoutMs: config.connectTimeoutMs ?? 2000,
      statementTimeoutMs: config.statementTimeoutMs ?? 15_000,
      lockTimeoutMs: Math.min(patience.lockTimeoutMs, 5000),
      onStatement,
    });
  }
  throw new Failure<CatalogError>({
    kind: 'catalog-unavailable',
    message: 'the catalog URL is neither sqlite:/path nor postgres://…',
  });
}

async function requireCurrent(database: Database, list: readonly Migration[]): Promise<void> {
  const { pending } = await migrationStatus(database, list);
  if (pending.length === 0) return;
  const message = `the catalog lacks migrations (${pending.join(', ')}): run "varve migrate"`;
  throw new Failure<CatalogError>({ kind: 'catalog-older', message });
}

/** Where thrown failures become results. */
async function edge<T, E extends FailureDetail>(work: () => Promise<T>): Promise<Result<T, E>> {
  try {
    return ok(await work());
  } catch (error) {
    if (error instanceof Failure) return err(error.detail as E);
    throw error;
  }
}

function face(database: Database): OpenCatalog {
  const read = <T, E extends FailureDetail>(
    name: string,
    work: (tx: Tx) => Promise<T>,
    before?: () => void,
  ): Promise<Result<T, E>> =>
    edge(async () => {
      before?.();
      return await database.read(name, work);
    });
  const write = <T, E extends FailureDetail>(
    name: string,
    work: (tx: Tx) => Promise<T>,
    before?: () => void,
  ): Promise<Result<T, E>> =>
    edge(async () => {
      before?.();
      return await database.write(name, work);
    });
  return {
    database,
    dialect: database.port.name,
    ...nodeFace(database, read, write),
    ...snapshotFace(read, write),
    ...claimFace(read, write),
    ping: () =>
      read('ping', async (tx) => {
        await sql`SELECT 1`.execute(tx.db);
      }),
    close: () => database.close(),
  };
}

type Run = <T, E extends FailureDetail>(
  name: string,
  work: (tx: Tx) => Promise<T>,
  before?: () => void,
) => Promise<Result<T, E>>;

type NodeCalls =
  | 'abandonUploads'
  | 'forgetNode'
  | 'giveUpUploads'
  | 'listNodes'
  | 'listUploads'
  | 'recordUpload'
  | 'registerNode';

function nodeFace(database: Database, read: Run, write: Run): Pick<Catalog, NodeCalls> {
  return {
    registerNode: ({ nodeId, address }) =>
      write(
        'register-node',
        (tx) => nodes.registerNode(tx, nodeId, address ?? null),
        () => {
          check.checkForeignName('nodeId', nodeId);
          if (address !== undefined) check.checkAddress('address', address);
        },
      ),
    listNodes: () => read('list-nodes', selectNodes),
    forgetNode: (nodeId) =>
      edge(() => {
        check.checkForeignName('nodeId', nodeId);
        return forgetNode(database, nodeId);
      }),
    recordUpload: ({ nodeId, artifacts }) =>
      write(
        'record-upload',
        (tx) => nodes.recordUpload(tx, nodeId, artifacts),
        () => {
          check.checkForeignName('nodeId', nodeId);
          check.checkUploads(artifacts);
        },
      ),
    listUploads: (nodeId) => read('list-uploads', (tx) => selectUploads(tx, nodeId)),
    abandonUploads: (nodeId, keep) => edge(() => nodes.abandonUploads(database, nodeId, keep)),
    giveUpUploads: (keys) => edge(() => nodes.giveUpUploads(database, keys)),
  };
}

type SnapshotCalls =
  | 'addAlias'
  | 'findContent'
  | 'findLayers'
  | 'lineage'
  | 'list'
  | 'publish'
  | 'resolve'
  | 'retire'
  | 'setInvalid'
  | 'show';

function snapshotFace(read: Run, write: Run): Pick<Catalog, SnapshotCalls> {
  return {
    publish: (request) =>
      write(
        'publish',
        (tx) => publish(tx, request),
        () => check.checkPublish(request),
      ),
    resolve: (idOrAlias) => read('resolve', (tx) => snapshots.resolveSnapshot(tx, idOrAlias)),
    show: (idOrAlias) => read('show', (tx) => snapshots.requireSnapshot(tx, idOrAlias)),
    findContent: (id) =>
      read('find-content', async (tx) => {
        const content = await findContent(tx, id);
        return content ?? check.refuse('content-missing', id, `there is no content ${id}`);
      }),
    list: (request) =>
      read(
        'list',
        (tx) => snapshots.listSnapshots(tx, request),
        () => check.checkList(request),
      ),
    findLayers: (uuids) => read('find-layers', (tx) => findLayers(tx, uuids)),
    lineage: (head) =>
      read(
        'lineage',
        (tx) => snapshots.findLineage(tx, head),
        () => check.checkUuid('head', head),
      ),
    addAlias: (alias, snapshotId) =>
      write(
        'add-alias',
        (tx) => snapshots.addAlias(tx, alias, snapshotId),
        () => check.checkName('alias', alias),
      ),
    retire: (idOrAlias) =>
      write('retire', async (tx) => {
        const { id } = await snapshots.requireSnapshot(tx, idOrAlias);
        return await holds.retireSnapshot(tx, id);
      }),
    setInvalid: (idOrAlias, reason) =>
      write(
        'set-invalid',
        (tx) => snapshots.setInvalid(tx, idOrAlias, reason),
        () => {
          if (reason !== null) check.checkText('reason', reason);
        },
      ),
  };
}

type ClaimCalls =
  | 'counts'
  | 'createVolume'
  | 'deleteVolume'
  | 'findVolume'
  | 'hold'
  | 'listHolds'
  | 'listVolumes'
  | 'release'
  | 'releaseMany'
  | 'switchVolume';

function claimFace(read: Run, write: Run): Pick<Catalog, ClaimCalls> {
  return {
    hold: (request) =>
      write(
        'hold',
        (tx) => holds.takeHold(tx, request),
        () => check.checkHold(request),
      ),
    release: (id) =>
      write(
        'release',
        (tx) => holds.releaseHolds(tx, [id]),
        () => check.checkName('holdId', id),
      ),
    releaseMany: (ids) =>
      write(
        'release',
        (tx) => holds.releaseHolds(tx, ids),
        () => ids.forEach((id) => check.checkName('holdId', id)),
      ),
    listHolds: ({ nodeId, contentId, closed, limit }) =>
      read('list-holds', (tx) =>
        selectHolds(tx, {
          nodeId,
          contentId,
          closed: closed ?? false,
          limit: Math.min(limit ?? check.PAGE_ROWS_MAX, check.PAGE_ROWS_MAX),
        }),
      ),
    counts: (nodeId) =>
      read('counts', async (tx) => ({
        openHolds: await countOpenHolds(tx, nodeId),
        backlog: (await reclaimBacklog(tx)).objects,
      })),
    createVolume: ({ id, contentId }) =>
      write(
        'create-volume',
        (tx) => holds.createVolume(tx, id, contentId),
        () => check.checkName('id', id),
      ),
    findVolume: (id) =>
      read('find-volume', async (tx) => {
        const volume = await findVolume(tx, id);
        return volume ?? check.refuse('volume-missing', id, `there is no volume ${id}`);
      }),
    listVolumes: ({ after, limit }) =>
      read('list-volumes', (tx) =>
        selectVolumes(tx, after, Math.min(limit ?? check.PAGE_ROWS_MAX, check.PAGE_ROWS_MAX)),
      ),
    switchVolume: (request) =>
      write(
        'switch-volume',
        (tx) => holds.switchVolume(tx, request),
        () => check.checkInteger('version', request.version),
      ),
    deleteVolume: (id) => write('delete-volume', (tx) => holds.deleteVolume(tx, id)),
  };
}
