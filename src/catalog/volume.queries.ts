/** Table `volume`: a lasting name whose backing content switches by compare-and-set. */
import type { ColumnType } from 'kysely';
import type { ContentId } from '../units.ts';
import type { Volume } from './catalog.ts';
import type { Tx } from './database.ts';

export interface VolumeTable {
  readonly id: ColumnType<string, string, never>;
  readonly content_id: ContentId;
  readonly version: number;
  readonly created_at_ms: ColumnType<number, number, never>;
  readonly switched_at_ms: number;
}

interface VolumeRow {
  readonly id: string;
  readonly content_id: ContentId;
  readonly version: number;
  readonly created_at_ms: number;
  readonly switched_at_ms: number;
}

const toVolume = (row: VolumeRow): Volume => ({
  id: row.id,
  contentId: row.content_id,
  version: row.version,
  createdAtMs: row.created_at_ms,
  switchedAtMs: row.switched_at_ms,
});

export async function findVolume(tx: Tx, id: string, lock?: 'update'): Promise<Volume | undefined> {
  const row = await tx.db
    .selectFrom('volume')
    .selectAll()
    .where('id', '=', id)
    .$if(tx.rowLocks && lock === 'update', (query) => query.forUpdate())
    .executeTakeFirst();
  return row && toVolume(row);
}

export async function insertVolume(tx: Tx, id: string, contentId: ContentId): Promise<void> {
  await tx.db
    .insertInto('volume')
    .values({
      id,
      content_id: contentId,
      version: 1,
      created_at_ms: tx.nowMs,
      switched_at_ms: tx.nowMs,
    })
    .execute();
}

export async function updateBacking(
  tx: Tx,
  volume: { id: string; version: number; contentId: ContentId },
): Promise<void> {
  await tx.db
    .updateTable('volume')
    .set({
      content_id: volume.contentId,
      version: volume.version + 1,
      switched_at_ms: tx.nowMs,
    })
    .where('id', '=', volume.id)
    .where('version', '=', volume.version)
    .execute();
}

export async function removeVolume(tx: Tx, id: string): Promise<void> {
  await tx.db.deleteFrom('volume').where('id', '=', id).execute();
}

export async function selectVolumes(
  tx: Tx,
  after: string | undefined,
  limit: number,
): Promise<Volume[]> {
  let query = tx.db.selectFrom('volume').selectAll();
  if (after !== undefined) query = query.where('id', '>', after);
  const rows = await query.orderBy('id').limit(limit).execute();
  return rows.map(toVolume);
}
