/**
 * Table `alias`: names that mean one snapshot for good. Trimming a snapshot keeps its names spent.
 */
import type { ColumnType } from 'kysely';
import type { SnapshotId } from '../units.ts';
import type { Tx } from './database.ts';

export interface AliasTable {
  readonly name: ColumnType<string, string, never>;
  /** Null once the snapshot's row has been trimmed. */
  readonly snapshot_id: SnapshotId | null;
  readonly named_snapshot_id: ColumnType<SnapshotId, SnapshotId, never>;
  readonly created_at_ms: ColumnType<number, number, never>;
}

/** Which snapshot the name means, whatever became of it. */
export async function findAlias(tx: Tx, name: string): Promise<SnapshotId | undefined> {
  const row = await tx.db
    .selectFrom('alias')
    .select('named_snapshot_id')
    .where('name', '=', name)
    .executeTakeFirst();
  return row?.named_snapshot_id;
}

export async function insertAlias(tx: Tx, name: string, snapshotId: SnapshotId): Promise<void> {
  await tx.db
    .insertInto('alias')
    .values({
      name,
      snapshot_id: snapshotId,
      named_snapshot_id: snapshotId,
      created_at_ms: tx.nowMs,
    })
    .execute();
}
