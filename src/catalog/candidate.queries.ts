/**
 * Tables `candidate_content`, `candidate_layer`: what may have become unused. Whoever ends a claim on a
 * content or layer queues it here, holding that row's lock, so that no last claim ends unnoticed.
 */
import type { ColumnType } from 'kysely';
import type { ContentId, LayerUuid } from '../units.ts';
import { chunks } from './database.ts';
import type { Tx } from './database.ts';

export interface CandidateContentTable {
  readonly content_id: ColumnType<ContentId, ContentId, never>;
  readonly queued_at_ms: ColumnType<number, number, never>;
}

export interface CandidateLayerTable {
  readonly layer_uuid: ColumnType<LayerUuid, LayerUuid, never>;
  readonly queued_at_ms: ColumnType<number, number, never>;
}

/**
 * Queues those of the contents that nothing claims any more. Call after ending a claim, with their rows
 * locked (`lockContents`) before it: of two transactions that end the last two claims, one sees none left.
 */
export async function queueUnclaimed(tx: Tx, contentIds: readonly ContentId[]): Promise<void> {
  for (const some of chunks([...new Set(contentIds)])) {
    const unclaimed = await tx.db
      .selectFrom('content')
      .select('content.id')
      .where('content.id', 'in', some)
      .where((eb) =>
        eb.not(
          eb.exists(
            eb
              .selectFrom('snapshot')
              .select('snapshot.id')
              .whereRef('snapshot.content_id', '=', 'content.id'),
          ),
        ),
      )
      .where((eb) =>
        eb.not(
          eb.exists(
            eb.selectFrom('hold').select('hold.id').whereRef('hold.content_id', '=', 'content.id'),
          ),
        ),
      )
      .where((eb) =>
        eb.not(
          eb.exists(
            eb
              .selectFrom('volume')
              .select('volume.id')
              .whereRef('volume.content_id', '=', 'content.id'),
          ),
        ),
      )
      .execute();
    if (unclaimed.length === 0) continue;
    await tx.db
      .insertInto('candidate_content')
      .values(unclaimed.map(({ id }) => ({ content_id: id, queued_at_ms: tx.nowMs })))
      .onConflict((conflict) => conflict.column('content_id').doNothing())
      .execute();
  }
}

/** Locks the contents' rows in id order against others that end claims, and against deletion. */
export async function lockContents(tx: Tx, contentIds: readonly ContentId[]): Promise<void> {
  if (!tx.rowLocks) return;
  for (const some of chunks([...new Set(contentIds)].sort())) {
    await tx.db
      .selectFrom('content')
      .select('id')
      .where('id', 'in', some)
      .orderBy('id')
      .forNoKeyUpdate()
      .execute();
  }
}

export async function queueLayers(tx: Tx, uuids: readonly LayerUuid[]): Promise<void> {
  for (const some of chunks([...new Set(uuids)])) {
    await tx.db
      .insertInto('candidate_layer')
      .values(some.map((uuid) => ({ layer_uuid: uuid, queued_at_ms: tx.nowMs })))
      .onConflict((conflict) => conflict.column('layer_uuid').doNothing())
      .execute();
  }
}
