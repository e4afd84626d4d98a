/** Table `node`: daemons that publish, upload and hold. A forgotten node's id is spent. */
import type { ColumnType } from 'kysely';
import type { NodeId } from '../units.ts';
import type { NodeRecord } from './catalog.ts';
import type { Tx } from './database.ts';

export interface NodeTable {
  readonly id: ColumnType<NodeId, NodeId, never>;
  readonly address: string | null;
  readonly registered_at_ms: ColumnType<number, number, never>;
  readonly forgotten_at_ms: number | null;
}

interface NodeRow {
  readonly id: NodeId;
  readonly address: string | null;
  readonly registered_at_ms: number;
  readonly forgotten_at_ms: number | null;
}

const toNode = (row: NodeRow): NodeRecord => ({
  id: row.id,
  address: row.address,
  registeredAtMs: row.registered_at_ms,
  forgottenAtMs: row.forgotten_at_ms,
});

/** `lock`: nobody can forget the node before this transaction ends. */
export async function findNode(
  tx: Tx,
  id: NodeId,
  lock?: 'shared' | 'exclusive',
): Promise<NodeRecord | undefined> {
  const row = await tx.db
    .selectFrom('node')
    .selectAll()
    .where('id', '=', id)
    .$if(tx.rowLocks && lock === 'shared', (query) => query.forKeyShare())
    .$if(tx.rowLocks && lock === 'exclusive', (query) => query.forUpdate())
    .executeTakeFirst();
  return row && toNode(row);
}

export async function insertNode(tx: Tx, id: NodeId, address: string | null): Promise<void> {
  await tx.db
    .insertInto('node')
    .values({ id, address, registered_at_ms: tx.nowMs, forgotten_at_ms: null })
    .execute();
}

export async function updateNodeAddress(tx: Tx, id: NodeId, address: string | null): Promise<void> {
  await tx.db.updateTable('node').set({ address }).where('id', '=', id).execute();
}

export async function markNodeForgotten(tx: Tx, id: NodeId): Promise<void> {
  await tx.db.updateTable('node').set({ forgotten_at_ms: tx.nowMs }).where('id', '=', id).execute();
}

export async function selectNodes(tx: Tx): Promise<NodeRecord[]> {
  const rows = await tx.db.selectFrom('node').selectAll().orderBy('id').execute();
  return rows.map(toNode);
}
