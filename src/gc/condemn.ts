/**
 * The transactions by which the catalog forgets. Each takes a bounded batch of candidates that no
 * other collector is at, decides under the locks of their rows, and queues the objects of what it
 * deletes.
 *
 * G1 A row is deleted only when, under its lock, nothing needs it; foreign keys check that again.
 * G2 Deleting a row queues its object for reclaim in the same transaction.
 * G3 Whoever takes a need away from a layer holds that layer's lock until it is queued as a
 *    candidate.
 *
 * Locks (PostgreSQL): candidates SKIP LOCKED, then rows FOR UPDATE in key order, then what they
 * needed FOR NO KEY UPDATE. Two collectors can still meet crosswise on layers; the deadlock is
 * found and one of them runs again.
 */
import type { StoredArtifact } from '../artifact/store.ts';
import { deleteArtifacts, findArtifacts } from '../catalog/artifact.queries.ts';
import {
  dropContentCandidates,
  dropLayerCandidates,
  lockLayers,
  lockUnclaimedContents,
  lockUnneededLayers,
  queueLayers,
  takeContentCandidates,
  takeLayerCandidates,
} from '../catalog/candidate.queries.ts';
import {
  deleteContents,
  selectArtifactKeys,
  selectSharedKeys,
} from '../catalog/content.queries.ts';
import type { Tx } from '../catalog/database.ts';
import { deleteLayers } from '../catalog/layer.queries.ts';
import { insertReclaims } from '../catalog/reclaim.queries.ts';
import { corrupt } from '../catalog/snapshots.ts';
import type { ArtifactKey, LayerUuid } from '../units.ts';

export interface Condemned {
  /** Candidates looked at; 0 means there are none left that nobody else is at. */
  readonly examined: number;
  readonly deleted: number;
}

/** Contents that nothing claims: their heads become candidates, their objects are queued. */
export async function condemnContents(tx: Tx, limit: number): Promise<Condemned> {
  const candidates = await takeContentCandidates(tx, limit);
  if (candidates.length === 0) return { examined: 0, deleted: 0 };
  const doomed = await lockUnclaimedContents(tx, candidates);
  const ids = doomed.map(({ id }) => id);
  const keys = await selectArtifactKeys(tx, ids);
  // Locked before they lose a user: of two contents that share one, the last to go sees that it is
  // the last.
  await requireArtifacts(tx, keys);
  await dropContentCandidates(tx, candidates);
  const { layers } = await deleteContents(tx, ids);
  const shared = await selectSharedKeys(tx, keys);
  const unused = keys.filter((key) => !shared.has(key));
  await queueObjects(tx, [...doomed.map(({ manifestKey }) => manifestKey), ...unused]);
  await queueAsCandidates(tx, layers);
  return { examined: candidates.length, deleted: ids.length };
}

/** Layers without a layer above or a head: their predecessors become candidates. */
export async function condemnLayers(tx: Tx, limit: number): Promise<Condemned> {
  const candidates = await takeLayerCandidates(tx, limit);
  if (candidates.length === 0) return { examined: 0, deleted: 0 };
  const doomed = await lockUnneededLayers(tx, candidates);
  const below = doomed.flatMap(({ predecessor }) => predecessor ?? []);
  await dropLayerCandidates(tx, candidates);
  await requireLayers(tx, below);
  await deleteLayers(
    tx,
    doomed.map(({ uuid }) => uuid),
  );
  await queueObjects(
    tx,
    doomed.map(({ artifactKey }) => artifactKey),
  );
  await queueLayers(tx, below);
  return { examined: candidates.length, deleted: doomed.length };
}

async function queueAsCandidates(tx: Tx, layers: readonly LayerUuid[]): Promise<void> {
  await requireLayers(tx, layers);
  await queueLayers(tx, layers);
}

async function queueObjects(tx: Tx, keys: readonly ArtifactKey[]): Promise<void> {
  await insertReclaims(tx, await requireArtifacts(tx, keys));
  await deleteArtifacts(tx, keys);
}

/**
 * A record that foreign keys promise and that is not there stops the run: nothing below it is
 * garbage.
 */
async function requireLayers(tx: Tx, uuids: readonly LayerUuid[]): Promise<void> {
  const found = new Set(await lockLayers(tx, uuids));
  const missing = uuids.find((uuid) => !found.has(uuid));
  if (missing !== undefined) corrupt(`layer ${missing} is needed, and its record is missing`);
}

async function requireArtifacts(tx: Tx, keys: readonly ArtifactKey[]): Promise<StoredArtifact[]> {
  const found = await findArtifacts(tx, keys, 'update');
  return keys.map(
    (key) => found.get(key) ?? corrupt(`object ${key} is needed, and its record is missing`),
  );
}
