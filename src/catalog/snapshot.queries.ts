/**
 * Table `snapshot`: the named things users see. A retired one keeps its row, but claims nothing.
 */
import type { ColumnType } from 'kysely';
import type { ContentId, NodeId, SnapshotId } from '../units.ts';
import type { Snapshot, SnapshotState } from './catalog.ts';
import { chunks } from './database.ts';
import type { Tx } from './database.ts';

export interface SnapshotTable {
  readonly id: ColumnType<SnapshotId, SnapshotId, never>;
  /** The claim on the content: null once retired. */
  readonly content_id: ContentId | null;
  readonly published_content_id: ColumnType<ContentId, ContentId, never>;
  readonly source_vm: ColumnType<string, string, never>;
  readonly node_id: ColumnType<NodeId, NodeId, never>;
  readonly created_at_ms: ColumnType<number, number, never>;
  readonly retired_at_ms: number | null;
  readonly invalid_reason: string | null;
  readonly suspect_reason: string | null;
}

interface SnapshotRow {
  readonly id: SnapshotId;
  readonly content_id: ContentId | null;
  readonly published_content_id: ContentId;
  readonly source_vm: string;
  readonly node_id: NodeId;
  readonly created_at_ms: number;
  readonly retired_at_ms: number | null;
  readonly invalid_reason: string | null;
  readonly suspect_reason: string | null;
}

const toSnapshot = (row: SnapshotRow, aliases: readonly string[]): Snapshot => ({
  id: row.id,
  state: row.content_id === null ? 'retired' : 'active',
  contentId: row.published_content_id,
  sourceVm: row.source_vm,
  nodeId: row.node_id,
  createdAtMs: row.created_at_ms,
  retiredAtMs: row.retired_at_ms,
  invalidReason: row.invalid_reason,
  suspectReason: row.suspect_reason,
  aliases,
});

export async function insertSnapshot(
  tx: Tx,
  snapshot: Omit<Snapshot, 'state' | 'retiredAtMs' | 'invalidReason' | 'aliases'>,
): Promise<void> {
  await tx.db
    .insertInto('snapshot')
    .values({
      id: snapshot.id,
      content_id: snapshot.contentId,
      published_content_id: snapshot.contentId,
      source_vm: snapshot.sourceVm,
      node_id: snapshot.nodeId,
      created_at_ms: snapshot.createdAtMs,
      retired_at_ms: null,
      invalid_reason: null,
      suspect_reason: snapshot.suspectReason,
    })
    .execute();
}

/** `update`: this transaction is about to change it. */
export async function findSnapshot(
  tx: Tx,
  id: SnapshotId,
  lock?: 'update',
): Promise<Snapshot | undefined> {
  const row = await tx.db
    .selectFrom('snapshot')
    .selectAll()
    .where('id', '=', id)
    .$if(tx.rowLocks && lock === 'update', (query) => query.forUpdate())
    .executeTakeFirst();
  if (row === undefined) return undefined;
  const aliases = await aliasesOf(tx, [id]);
  return toSnapshot(row, aliases.get(id) ?? []);
}

export async function markRetired(tx: Tx, id: SnapshotId): Promise<void> {
  await tx.db
    .updateTable('snapshot')
    .set({ content_id: null, retired_at_ms: tx.nowMs })
    .where('id', '=', id)
    .execute();
}

export async function markInvalid(tx: Tx, id: SnapshotId, reason: string | null): Promise<void> {
  await tx.db
    .updateTable('snapshot')
    .set({ invalid_reason: reason })
    .where('id', '=', id)
    .execute();
}

export interface SnapshotFilter {
  readonly after?: { readonly createdAtMs: number; readonly id: SnapshotId } | undefined;
  readonly limit: number;
  readonly sourceVm?: string | undefined;
  readonly alias?: string | undefined;
  readonly state?: SnapshotState | undefined;
  readonly createdFromMs?: number | undefined;
  readonly createdBeforeMs?: number | undefined;
}

/** Newest first. Each page is one index range, wherever it starts. */
export async function selectSnapshots(tx: Tx, filter: SnapshotFilter): Promise<Snapshot[]> {
  let query = tx.db.selectFrom('snapshot').selectAll('snapshot');
  if (filter.sourceVm !== undefined) query = query.where('source_vm', '=', filter.sourceVm);
  if (filter.state === 'active') query = query.where('content_id', 'is not', null);
  if (filter.state === 'retired') query = query.where('content_id', 'is', null);
  if (filter.createdFromMs !== undefined) {
    query = query.where('created_at_ms', '>=', filter.createdFromMs);
  }
  if (filter.createdBeforeMs !== undefined) {
    query = query.where('created_at_ms', '<', filter.createdBeforeMs);
  }
  const { alias, after } = filter;
  if (alias !== undefined) {
    query = query.where('id', '=', (eb) =>
      eb.selectFrom('alias').select('alias.named_snapshot_id').where('alias.name', '=', alias),
    );
  }
  if (after !== undefined) {
    query = query.where((eb) =>
      eb(eb.refTuple('created_at_ms', 'id'), '<', eb.tuple(after.createdAtMs, after.id)),
    );
  }
  const rows = await query
    .orderBy('created_at_ms', 'desc')
    .orderBy('id', 'desc')
    .limit(filter.limit)
    .execute();
  const aliases = await aliasesOf(
    tx,
    rows.map((row) => row.id),
  );
  return rows.map((row) => toSnapshot(row, aliases.get(row.id) ?? []));
}

async function aliasesOf(
  tx: Tx,
  ids: readonly SnapshotId[],
): Promise<ReadonlyMap<SnapshotId, string[]>> {
  const found = new Map<SnapshotId, string[]>();
  for (const some of chunks(ids)) {
    const rows = await tx.db
      .selectFrom('alias')
      .select(['name', 'named_snapshot_id'])
      .where('snapshot_id', 'in', some)
      .orderBy('name')
      .execute();
    for (const { name, named_snapshot_id: id } of rows) {
      found.set(id, [...(found.get(id) ?? []), name]);
    }
  }
  return found;
}
