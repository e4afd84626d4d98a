/**
 * Suspects: a verifying capture found pages of a VM that its layers do not read as the VM does. Marked
 * are those layers, all layers on top of them, and the snapshots that need one of these. A layer whose
 * capture looked at every page (`complete`) reads right whatever lies below it: neither it nor what
 * sits on it is marked. A publish on top of a marked layer takes the mark over. Writes: a row for each
 * layer and snapshot that is marked, in one transaction.
 */
import type { LayerUuid, SnapshotId } from '../units.ts';
import type { MarkedSuspects, NewLayer, Snapshot, SuspectRequest } from './catalog.ts';
import { chunks, type Tx } from './database.ts';
import { requireSnapshot } from './snapshots.ts';

/** `request` has passed `checkSuspects`. Marking again changes nothing: the first reason stays. */
export async function markSuspects(tx: Tx, request: SuspectRequest): Promise<MarkedSuspects> {
  const known = await existing(tx, request.layers);
  const marked = new Set<LayerUuid>();
  for (let level = known; level.length > 0; level = await above(tx, level)) {
    const fresh = level.filter((uuid) => !marked.has(uuid));
    for (const uuid of fresh) marked.add(uuid);
    level = fresh;
  }
  const snapshots = await markAll(tx, [...marked], request.reason);
  const there = new Set(known);
  return { snapshots, unknown: request.layers.filter((uuid) => !there.has(uuid)) };
}

async function existing(tx: Tx, uuids: readonly LayerUuid[]): Promise<LayerUuid[]> {
  const found: LayerUuid[] = [];
  for (const some of chunks(uuids)) {
    const rows = await tx.db.selectFrom('layer').select('uuid').where('uuid', 'in', some).execute();
    found.push(...rows.map(({ uuid }) => uuid));
  }
  return found;
}

async function above(tx: Tx, uuids: readonly LayerUuid[]): Promise<LayerUuid[]> {
  const found: LayerUuid[] = [];
  for (const some of chunks(uuids)) {
    const rows = await tx.db
      .selectFrom('layer')
      .select('uuid')
      .where('predecessor', 'in', some)
      .where('complete', '=', 0)
      .execute();
    found.push(...rows.map(({ uuid }) => uuid));
  }
  return found;
}

async function markAll(tx: Tx, uuids: readonly LayerUuid[], reason: string): Promise<SnapshotId[]> {
  const snapshots = new Set<SnapshotId>();
  for (const some of chunks(uuids)) {
    await tx.db
      .updateTable('layer')
      .set({ suspect_reason: reason })
      .where('uuid', 'in', some)
      .where('suspect_reason', 'is', null)
      .execute();
    const rows = await tx.db
      .selectFrom('content_head')
      .innerJoin('snapshot', 'snapshot.content_id', 'content_head.content_id')
      .select('snapshot.id')
      .where('content_head.layer_uuid', 'in', some)
      .execute();
    for (const { id } of rows) snapshots.add(id);
  }
  for (const some of chunks([...snapshots])) {
    await tx.db
      .updateTable('snapshot')
      .set({ suspect_reason: reason })
      .where('id', 'in', some)
      .where('suspect_reason', 'is', null)
      .execute();
  }
  return [...snapshots].sort();
}

/** Which of a publish's new layers are suspect, and why: those on a marked layer (see above). */
export function inheritedMarks(
  layers: readonly NewLayer[],
  known: ReadonlyMap<LayerUuid, string | null>,
): ReadonlyMap<LayerUuid, string | null> {
  const marks = new Map(known);
  for (const { uuid, predecessor, complete } of layers) {
    if (marks.has(uuid)) continue;
    const below = predecessor === null ? null : (marks.get(predecessor) ?? null);
    marks.set(uuid, complete === true ? null : below);
  }
  return marks;
}

export async function setSuspect(
  tx: Tx,
  idOrAlias: string,
  reason: string | null,
): Promise<Snapshot> {
  const snapshot = await requireSnapshot(tx, idOrAlias);
  await tx.db
    .updateTable('snapshot')
    .set({ suspect_reason: reason })
    .where('id', '=', snapshot.id)
    .execute();
  return { ...snapshot, suspectReason: reason };
}
