/**
 * Claims on contents that users take and end: holds and volumes, and the claim of a snapshot
 * itself.
 *
 * Ending a claim: lock the claim's row, lock the content's row, end it, and queue the content if
 * that was the last claim. Locks (PostgreSQL): claim FOR UPDATE, content FOR NO KEY UPDATE. Taking
 * a claim: a foreign key's key-share on the content. Writes: a constant each.
 */
import type { ContentId, HoldId, SnapshotId } from '../units.ts';
import { lockContents, queueUnclaimed } from './candidate.queries.ts';
import type { Hold, HoldRequest, Snapshot, Volume } from './catalog.ts';
import { refuse } from './check.ts';
import { findFingerprint } from './content.queries.ts';
import type { Tx } from './database.ts';
import {
  closeHolds,
  findHold,
  insertHold,
  insertSpentHolds,
  selectOpenHolds,
} from './hold.queries.ts';
import { requireNode } from './nodes.ts';
import { findSnapshotBy, requireUsable } from './snapshots.ts';
import { findSnapshot, markRetired } from './snapshot.queries.ts';
import { findVolume, insertVolume, removeVolume, updateBacking } from './volume.queries.ts';

export async function takeHold(tx: Tx, request: HoldRequest): Promise<Hold> {
  const { holdId, nodeId, purpose, target, allowSuspect = false } = request;
  await requireNode(tx, nodeId);
  const existing = await findHold(tx, holdId);
  if (existing?.releasedAtMs != null) {
    refuse('hold-released', holdId, `hold ${holdId} was released: take another under a new id`);
  }
  const contentId =
    'content' in target ? target.content : await usableContent(tx, target.snapshot, allowSuspect);
  if (existing !== undefined) {
    if (existing.contentId !== contentId || existing.nodeId !== nodeId) {
      refuse('hold-conflict', holdId, `hold ${holdId} exists for another content or node`);
    }
    return existing;
  }
  await requireContent(tx, contentId);
  await insertHold(tx, { id: holdId, contentId, nodeId, purpose });
  return { id: holdId, contentId, nodeId, purpose, createdAtMs: tx.nowMs, releasedAtMs: null };
}

async function usableContent(tx: Tx, idOrAlias: string, allowSuspect: boolean): Promise<ContentId> {
  const found = await findSnapshotBy(tx, idOrAlias);
  return requireUsable(found, idOrAlias, { allowSuspect }).contentId;
}

async function requireContent(tx: Tx, id: ContentId): Promise<void> {
  if ((await findFingerprint(tx, id, 'key-share')) === undefined) {
    refuse('content-missing', id, `content ${id} is not in the catalog (any more)`);
  }
}

/** Unknown ids become spent: a `hold` call that is still on its way can no longer take them. */
export async function releaseHolds(tx: Tx, ids: readonly HoldId[]): Promise<void> {
  const distinct = [...new Set(ids)].sort();
  await insertSpentHolds(tx, distinct);
  const open = await selectOpenHolds(tx, distinct);
  if (open.length === 0) return;
  const contents = open.map(({ contentId }) => contentId);
  await lockContents(tx, contents);
  await closeHolds(
    tx,
    open.map(({ id }) => id),
  );
  await queueUnclaimed(tx, contents);
}

export async function retireSnapshot(tx: Tx, id: SnapshotId): Promise<Snapshot> {
  const snapshot = await findSnapshot(tx, id, 'update');
  if (snapshot === undefined) return refuse('snapshot-missing', id, `there is no snapshot ${id}`);
  if (snapshot.state === 'retired') return snapshot;
  await lockContents(tx, [snapshot.contentId]);
  await markRetired(tx, id);
  await queueUnclaimed(tx, [snapshot.contentId]);
  return { ...snapshot, state: 'retired', retiredAtMs: tx.nowMs };
}

export async function createVolume(tx: Tx, id: string, contentId: ContentId): Promise<Volume> {
  const existing = await findVolume(tx, id);
  if (existing !== undefined) {
    if (existing.contentId !== contentId) {
      refuse('volume-conflict', id, `volume ${id} exists, backed by ${existing.contentId}`);
    }
    return existing;
  }
  await requireContent(tx, contentId);
  await insertVolume(tx, id, contentId);
  return { id, contentId, version: 1, createdAtMs: tx.nowMs, switchedAtMs: tx.nowMs };
}

export async function switchVolume(
  tx: Tx,
  request: { id: string; version: number; contentId: ContentId },
): Promise<Volume> {
  const { id, version, contentId } = request;
  const volume = await findVolume(tx, id, 'update');
  if (volume === undefined) return refuse('volume-missing', id, `there is no volume ${id}`);
  // The same switch again, after its answer was lost.
  if (volume.version === version + 1 && volume.contentId === contentId) return volume;
  if (volume.version !== version) {
    refuse('volume-moved', id, `volume ${id} is at version ${volume.version}, not ${version}`);
  }
  await requireContent(tx, contentId);
  await lockContents(tx, [volume.contentId]);
  await updateBacking(tx, request);
  await queueUnclaimed(tx, [volume.contentId]);
  return { ...volume, contentId, version: version + 1, switchedAtMs: tx.nowMs };
}

export async function deleteVolume(tx: Tx, id: string): Promise<void> {
  const volume = await findVolume(tx, id, 'update');
  if (volume === undefined) return;
  await lockContents(tx, [volume.contentId]);
  await removeVolume(tx, id);
  await queueUnclaimed(tx, [volume.contentId]);
}
