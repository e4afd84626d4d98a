/**
 * Table `hold`: durable claims on a content. A closed one keeps its row until trimmed, but claims
 * nothing.
 */
import type { ColumnType } from 'kysely';
import type { ContentId, HoldId, NodeId } from '../units.ts';
import type { Hold } from './catalog.ts';
import { chunks } from './database.ts';
import type { Tx } from './database.ts';

export interface HoldTable {
  readonly id: ColumnType<HoldId, HoldId, never>;
  /** The claim: null once released. */
  readonly content_id: ContentId | null;
  readonly held_content_id: ColumnType<ContentId | null, ContentId | null, never>;
  readonly node_id: ColumnType<NodeId | null, NodeId | null, never>;
  readonly purpose: ColumnType<string, string, never>;
  readonly created_at_ms: ColumnType<number, number, never>;
  readonly released_at_ms: number | null;
}

interface HoldRow {
  readonly id: HoldId;
  readonly held_content_id: ContentId | null;
  readonly node_id: NodeId | null;
  readonly purpose: string;
  readonly created_at_ms: number;
  readonly released_at_ms: number | null;
}

const toHold = (row: HoldRow): Hold => ({
  id: row.id,
  contentId: row.held_content_id,
  nodeId: row.node_id,
  purpose: row.purpose,
  createdAtMs: row.created_at_ms,
  releasedAtMs: row.released_at_ms,
});

export async function findHold(tx: Tx, id: HoldId): Promise<Hold | undefined> {
  const row = await tx.db.selectFrom('hold').selectAll().where('id', '=', id).executeTakeFirst();
  return row && toHold(row);
}

interface OpenHold {
  readonly id: HoldId;
  readonly contentId: ContentId;
  readonly nodeId: NodeId;
  readonly purpose: string;
}

const openRow = (tx: Tx, hold: OpenHold) => ({
  id: hold.id,
  content_id: hold.contentId,
  held_content_id: hold.contentId,
  node_id: hold.nodeId,
  purpose: hold.purpose,
  created_at_ms: tx.nowMs,
  released_at_ms: null,
});

export async function insertHold(tx: Tx, hold: OpenHold): Promise<void> {
  await tx.db.insertInto('hold').values(openRow(tx, hold)).execute();
}

/** False where the id is in use or spent; on PostgreSQL after whoever is about to decide that. */
export async function insertHoldIfNew(tx: Tx, hold: OpenHold): Promise<boolean> {
  const result = await tx.db
    .insertInto('hold')
    .values(openRow(tx, hold))
    .onConflict((conflict) => conflict.column('id').doNothing())
    .executeTakeFirst();
  return result.numInsertedOrUpdatedRows === 1n;
}

/**
 * Spends ids that no `hold` call has used: one still under way, or one to come, can no longer take
 * them.
 */
export async function insertSpentHolds(tx: Tx, ids: readonly HoldId[]): Promise<void> {
  for (const some of chunks(ids)) {
    await tx.db
      .insertInto('hold')
      .values(
        some.map((id) => ({
          id,
          content_id: null,
          held_content_id: null,
          node_id: null,
          purpose: '',
          created_at_ms: tx.nowMs,
          released_at_ms: tx.nowMs,
        })),
      )
      .onConflict((conflict) => conflict.column('id').doNothing())
      .execute();
  }
}

/** Open ones among `ids`, in id order, locked: this transaction is about to close them. */
export async function selectOpenHolds(
  tx: Tx,
  ids: readonly HoldId[],
): Promise<{ id: HoldId; contentId: ContentId }[]> {
  const found: { id: HoldId; contentId: ContentId }[] = [];
  for (const some of chunks(ids)) {
    const rows = await tx.db
      .selectFrom('hold')
      .select(['id', 'content_id'])
      .where('id', 'in', some)
      .where('content_id', 'is not', null)
      .orderBy('id')
      .$if(tx.rowLocks, (query) => query.forUpdate())
      .$narrowType<{ content_id: ContentId }>()
      .execute();
    found.push(...rows.map((row) => ({ id: row.id, contentId: row.content_id })));
  }
  return found;
}

export async function selectOpenHoldIdsOfNode(tx: Tx, nodeId: NodeId): Promise<HoldId[]> {
  const rows = await tx.db
    .selectFrom('hold')
    .select('id')
    .where('node_id', '=', nodeId)
    .where('released_at_ms', 'is', null)
    .execute();
  return rows.map((row) => row.id);
}

export async function countOpenHolds(tx: Tx, nodeId: NodeId): Promise<number> {
  const row = await tx.db
    .selectFrom('hold')
    .select((eb) => eb.fn.countAll<number>().as('count'))
    .where('node_id', '=', nodeId)
    .where('released_at_ms', 'is', null)
    .executeTakeFirstOrThrow();
  return row.count;
}

export async function closeHolds(tx: Tx, ids: readonly HoldId[]): Promise<void> {
  for (const some of chunks(ids)) {
    await tx.db
      .updateTable('hold')
      .set({ content_id: null, released_at_ms: tx.nowMs })
      .where('id', 'in', some)
      .execute();
  }
}

export async function selectHolds(
  tx: Tx,
  filter: {
    nodeId?: NodeId | undefined;
    contentId?: ContentId | undefined;
    closed: boolean;
    limit: number;
  },
): Promise<Hold[]> {
  let query = tx.db.selectFrom('hold').selectAll();
  if (filter.nodeId !== undefined) query = query.where('node_id', '=', filter.nodeId);
  if (filter.contentId !== undefined) {
    query = filter.closed
      ? query.where('held_content_id', '=', filter.contentId)
      : query.where('content_id', '=', filter.contentId);
  }
  query = query.where('released_at_ms', filter.closed ? 'is not' : 'is', null);
  const rows = await query.orderBy('id').limit(filter.limit).execute();
  return rows.map(toHold);
}
