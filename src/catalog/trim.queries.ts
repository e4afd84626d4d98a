/**
 * Deleting rows that only remember: closed holds, retired snapshots, reports of old collections.
 */
import type { Tx } from './database.ts';

/** Returns how many went; fewer than `limit` means there are no more. Open holds never match. */
export async function trimHolds(tx: Tx, beforeMs: number, limit: number): Promise<number> {
  const rows = await tx.db
    .selectFrom('hold')
    .select('id')
    .where('released_at_ms', '<', beforeMs)
    .limit(limit)
    .$if(tx.rowLocks, (query) => query.forUpdate().skipLocked())
    .execute();
  const ids = rows.map((row) => row.id);
  if (ids.length > 0) await tx.db.deleteFrom('hold').where('id', 'in', ids).execute();
  return ids.length;
}

/** Active snapshots never match. Their names stay spent. */
export async function trimSnapshots(tx: Tx, beforeMs: number, limit: number): Promise<number> {
  const rows = await tx.db
    .selectFrom('snapshot')
    .select('id')
    .where('retired_at_ms', '<', beforeMs)
    .limit(limit)
    .$if(tx.rowLocks, (query) => query.forUpdate().skipLocked())
    .execute();
  const ids = rows.map((row) => row.id);
  if (ids.length > 0) {
    const named = tx.db.updateTable('alias').set({ snapshot_id: null });
    await named.where('snapshot_id', 'in', ids).execute();
    await tx.db.deleteFrom('snapshot').where('id', 'in', ids).execute();
  }
  return ids.length;
}

export async function trimRuns(tx: Tx, beforeMs: number, limit: number): Promise<number> {
  const rows = await tx.db
    .selectFrom('gc_run')
    .select('id')
    .where('started_at_ms', '<', beforeMs)
    .limit(limit)
    .$if(tx.rowLocks, (query) => query.forUpdate().skipLocked())
    .execute();
  const ids = rows.map((row) => row.id);
  if (ids.length > 0) await tx.db.deleteFrom('gc_run').where('id', 'in', ids).execute();
  return ids.length;
}
