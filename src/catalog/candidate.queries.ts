/**
 * Tables `candidate_content`, `candidate_layer`: what may have become unused. Whoever ends a claim
 * on a content or layer queues it here, holding that row's lock, so that no last claim ends
 * unnoticed.
 */
import type { ColumnType, ExpressionBuilder } from 'kysely';
import type { ArtifactKey, ContentId, LayerUuid } from '../units.ts';
import { chunks } from './database.ts';
import type { Tx } from './database.ts';
import type { CatalogSchema } from './schema.ts';

export interface CandidateContentTable {
  readonly content_id: ColumnType<ContentId, ContentId, never>;
  readonly queued_at_ms: ColumnType<number, number, never>;
}

export interface CandidateLayerTable {
  readonly layer_uuid: ColumnType<LayerUuid, LayerUuid, never>;
  readonly queued_at_ms: ColumnType<number, number, never>;
}

/** A snapshot, an open hold or a volume needs the content. */
export function isClaimed(eb: ExpressionBuilder<CatalogSchema, 'content'>) {
  return eb.or([
    eb.exists(
      eb
        .selectFrom('snapshot')
        .select('snapshot.id')
        .whereRef('snapshot.content_id', '=', 'content.id'),
    ),
    eb.exists(
      eb.selectFrom('hold').select('hold.id').whereRef('hold.content_id', '=', 'content.id'),
    ),
    eb.exists(
      eb.selectFrom('volume').select('volume.id').whereRef('volume.content_id', '=', 'content.id'),
    ),
  ]);
}

/** A layer above, or a content's head, needs the layer. */
export function isNeeded(eb: ExpressionBuilder<CatalogSchema, 'layer'>) {
  return eb.or([
    eb.exists(
      eb
        .selectFrom('layer as child')
        .select('child.uuid')
        .whereRef('child.predecessor', '=', 'layer.uuid'),
    ),
    eb.exists(
      eb
        .selectFrom('content_head')
        .select('content_head.role')
        .whereRef('content_head.layer_uuid', '=', 'layer.uuid'),
    ),
  ]);
}

/**
 * Queues those of the contents that nothing claims any more. Call after ending a claim, with their
 * rows locked (`lockContents`) before it: of two transactions that end the last two claims, one
 * sees none left.
 */
export async function queueUnclaimed(tx: Tx, contentIds: readonly ContentId[]): Promise<void> {
  for (const some of chunks([...new Set(contentIds)])) {
    const unclaimed = await tx.db
      .selectFrom('content')
      .select('content.id')
      .where('content.id', 'in', some)
      .where((eb) => eb.not(isClaimed(eb)))
      .execute();
    await queueContents(
      tx,
      unclaimed.map(({ id }) => id),
    );
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

export async function queueContents(tx: Tx, ids: readonly ContentId[]): Promise<void> {
  for (const some of chunks(ids)) {
    await tx.db
      .insertInto('candidate_content')
      .values(some.map((id) => ({ content_id: id, queued_at_ms: tx.nowMs })))
      .onConflict((conflict) => conflict.column('content_id').doNothing())
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

/** Some candidates that no other collector is at, theirs until the transaction ends. */
export async function takeContentCandidates(tx: Tx, limit: number): Promise<ContentId[]> {
  const rows = await tx.db
    .selectFrom('candidate_content')
    .select('content_id')
    .limit(limit)
    .$if(tx.rowLocks, (query) => query.forUpdate().skipLocked())
    .execute();
  return rows.map((row) => row.content_id);
}

export async function takeLayerCandidates(tx: Tx, limit: number): Promise<LayerUuid[]> {
  const rows = await tx.db
    .selectFrom('candidate_layer')
    .select('layer_uuid')
    .limit(limit)
    .$if(tx.rowLocks, (query) => query.forUpdate().skipLocked())
    .execute();
  return rows.map((row) => row.layer_uuid);
}

export async function dropContentCandidates(tx: Tx, ids: readonly ContentId[]): Promise<void> {
  for (const some of chunks(ids)) {
    await tx.db.deleteFrom('candidate_content').where('content_id', 'in', some).execute();
  }
}

export async function dropLayerCandidates(tx: Tx, uuids: readonly LayerUuid[]): Promise<void> {
  for (const some of chunks(uuids)) {
    await tx.db.deleteFrom('candidate_layer').where('layer_uuid', 'in', some).execute();
  }
}

export interface UnclaimedContent {
  readonly id: ContentId;
  readonly manifestKey: ArtifactKey;
}

/**
 * Those of `ids` that nothing claims, locked against whoever might: taking a claim waits for the
 * outcome.
 */
export async function lockUnclaimedContents(
  tx: Tx,
  ids: readonly ContentId[],
): Promise<UnclaimedContent[]> {
  const found: UnclaimedContent[] = [];
  for (const some of chunks([...ids].sort())) {
    if (tx.rowLocks) {
      const lock = tx.db.selectFrom('content').select('id').where('id', 'in', some);
      await lock.orderBy('id').forUpdate().execute();
    }
    const rows = await tx.db
      .selectFrom('content')
      .select(['content.id', 'content.manifest_key as manifestKey'])
      .where('content.id', 'in', some)
      .where((eb) => eb.not(isClaimed(eb)))
      .execute();
    found.push(...rows);
  }
  return found;
}

export interface UnneededLayer {
  readonly uuid: LayerUuid;
  readonly predecessor: LayerUuid | null;
  readonly artifactKey: ArtifactKey;
}

/** Those of `uuids` that nothing needs, locked: a publish on top of one waits for the outcome. */
export async function lockUnneededLayers(
  tx: Tx,
  uuids: readonly LayerUuid[],
): Promise<UnneededLayer[]> {
  const found: UnneededLayer[] = [];
  for (const some of chunks([...uuids].sort())) {
    if (tx.rowLocks) {
      const lock = tx.db.selectFrom('layer').select('uuid').where('uuid', 'in', some);
      await lock.orderBy('uuid').forUpdate().execute();
    }
    const rows = await tx.db
      .selectFrom('layer')
      .select(['layer.uuid', 'layer.predecessor', 'layer.artifact_key as artifactKey'])
      .where('layer.uuid', 'in', some)
      .where((eb) => eb.not(isNeeded(eb)))
      .execute();
    found.push(...rows);
  }
  return found;
}

/** Those that exist, locked against others that end what needs them. In uuid order. */
export async function lockLayers(tx: Tx, uuids: readonly LayerUuid[]): Promise<LayerUuid[]> {
  const found: LayerUuid[] = [];
  for (const some of chunks([...new Set(uuids)].sort())) {
    const rows = await tx.db
      .selectFrom('layer')
      .select('uuid')
      .where('uuid', 'in', some)
      .orderBy('uuid')
      .$if(tx.rowLocks, (query) => query.forNoKeyUpdate())
      .execute();
    found.push(...rows.map((row) => row.uuid));
  }
  return found;
}
