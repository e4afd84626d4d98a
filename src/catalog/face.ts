/** The catalog's calls: what is asked of each is checked, run as a transaction, and answered. */
import { sql } from 'kysely';
import { Failure, err, ok } from '../result.ts';
import type { FailureDetail, Result } from '../result.ts';
import type { Catalog } from './catalog.ts';
import * as check from './check.ts';
import { findContent } from './content.queries.ts';
import type { Database, Transactions, Tx } from './database.ts';
import { forgetNode } from './forget.ts';
import { countOpenHolds, selectHolds } from './hold.queries.ts';
import * as holds from './holds.ts';
import { findLayers } from './layer.queries.ts';
import { selectNodes } from './node.queries.ts';
import * as nodes from './nodes.ts';
import { publish } from './publish.ts';
import { reclaimBacklog } from './reclaim.queries.ts';
import * as snapshots from './snapshots.ts';
import { markSuspects, setSuspect } from './suspects.ts';
import { selectUploads } from './upload.queries.ts';
import { findVolume, selectVolumes } from './volume.queries.ts';

/** Where thrown failures become results. */
export async function edge<T, E extends FailureDetail>(
  work: () => Promise<T>,
): Promise<Result<T, E>> {
  try {
    return ok(await work());
  } catch (error) {
    if (error instanceof Failure) return err(error.detail as E);
    throw error;
  }
}

/** A catalog, and what runs its transactions: for `src/gc`, which shares its tables. */
export interface OpenCatalog<D extends Transactions = Database> extends Catalog {
  readonly database: D;
}

export function catalogOn<D extends Transactions>(
  database: D,
  dialect: Catalog['dialect'],
): OpenCatalog<D> {
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
    dialect,
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

function nodeFace(database: Transactions, read: Run, write: Run): Pick<Catalog, NodeCalls> {
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
  | 'markSuspects'
  | 'publish'
  | 'resolve'
  | 'retire'
  | 'setInvalid'
  | 'setSuspect'
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
    markSuspects: (request) =>
      write(
        'mark-suspects',
        (tx) => markSuspects(tx, request),
        () => check.checkSuspects(request),
      ),
    setSuspect: (idOrAlias, reason) =>
      write(
        'set-suspect',
        (tx) => setSuspect(tx, idOrAlias, reason),
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
