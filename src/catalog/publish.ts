/**
 * Publish: the one transaction that adds layers, a content and a snapshot.
 *
 * Writes: one row per new layer and its object, one per head, one per other object, at most one for
 * a hold, and a constant. The chain below the new layers is neither read nor written, however deep.
 * Statements: a constant, and one for each further 500 rows of a kind.
 * Locks (PostgreSQL): key-share on node, content, predecessors, heads' layers and shared objects.
 * So a publish and the condemnation of what it inherits wait for each other, and the loser sees the
 * outcome. A hold that is taken waits for a release of the same id, and the other way round: after
 * both, it is released, whichever came first.
 */
import { createHash } from 'node:crypto';
import type { StoredArtifact } from '../artifact/store.ts';
import { CHAIN_LAYERS_MAX } from '../units.ts';
import type { ArtifactKey, LayerUuid } from '../units.ts';
import { findAlias, insertAlias } from './alias.queries.ts';
import { findArtifacts, insertArtifacts } from './artifact.queries.ts';
import type { Layer, NewLayer, PublishRequest, PublishedSnapshot, Snapshot } from './catalog.ts';
import { refuse } from './check.ts';
import { findFingerprint, insertContent } from './content.queries.ts';
import type { Tx } from './database.ts';
import { findHold, insertHoldIfNew } from './hold.queries.ts';
import { findLayers, insertLayers } from './layer.queries.ts';
import { requireNode } from './nodes.ts';
import { insertReclaims } from './reclaim.queries.ts';
import { findSnapshot, insertSnapshot } from './snapshot.queries.ts';
import { requireFreeAlias } from './snapshots.ts';
import { inheritedMarks } from './suspects.ts';
import { takeUploads } from './upload.queries.ts';

/** `request` has passed `checkPublish`. */
export async function publish(tx: Tx, request: PublishRequest): Promise<PublishedSnapshot> {
  await requireNode(tx, request.nodeId);
  const fingerprint = contentFingerprint(request);
  const published = await findSnapshot(tx, request.snapshotId);
  const taken = await takeUploads(tx, keysOf(request));
  const uploads = new Map(taken.map((upload) => [upload.key, upload]));
  for (const { key, nodeId } of taken) {
    if (nodeId !== request.nodeId) {
      refuse('artifact-conflict', key, `${key} is being uploaded by another node, ${nodeId}`);
    }
  }
  const used = new Set<ArtifactKey>();
  const snapshot = published ?? (await insertNew(tx, request, fingerprint, uploads, used));
  if (published !== undefined) await requireSame(tx, request, fingerprint, published);
  // A snapshot that was there took its hold with it; what became of it since is no matter of ours.
  const held = published === undefined && (await takeHold(tx, request));
  const { alias } = request;
  const isNew = alias !== undefined && (await nameSnapshot(tx, request, alias));
  // Somebody else has published the same layer or content meanwhile: these copies are not needed.
  await insertReclaims(
    tx,
    taken.filter(({ key }) => !used.has(key)),
  );
  const aliases = isNew ? [...snapshot.aliases, alias].sort() : snapshot.aliases;
  return { snapshot: { ...snapshot, aliases }, created: published === undefined, held };
}

/** True if it was taken, false if none was asked for or its id is spent. */
async function takeHold(tx: Tx, request: PublishRequest): Promise<boolean> {
  const { hold, contentId, nodeId } = request;
  if (hold === undefined) return false;
  const { holdId: id, purpose } = hold;
  if (await insertHoldIfNew(tx, { id, contentId, nodeId, purpose })) return true;
  const existing = await findHold(tx, id);
  // Only what was released is ever trimmed.
  if (existing !== undefined && existing.releasedAtMs === null) {
    refuse('hold-conflict', id, `hold ${id} was taken before this publish`);
  }
  return false;
}

/** Two requests with one content id must agree on this. */
function contentFingerprint(request: PublishRequest): string {
  const heads = request.heads.map(({ role, layer }) => [role, layer]);
  const artifacts = request.artifacts.map(({ name, artifact }) => [name, artifact.digest]);
  const facts = [request.manifest.digest, heads.sort(byFirst), artifacts.sort(byFirst)];
  return createHash('sha256').update(JSON.stringify(facts)).digest('hex');
}

const byFirst = (a: readonly string[], b: readonly string[]): number =>
  Buffer.compare(Buffer.from(String(a[0])), Buffer.from(String(b[0])));

const keysOf = (request: PublishRequest): ArtifactKey[] => [
  request.manifest.key,
  ...request.layers.map(({ artifact }) => artifact.key),
  ...request.artifacts.map(({ artifact }) => artifact.key),
];

const newSnapshot = (request: PublishRequest): Snapshot => ({
  id: request.snapshotId,
  state: 'active',
  contentId: request.contentId,
  sourceVm: request.sourceVm,
  nodeId: request.nodeId,
  createdAtMs: request.createdAtMs,
  retiredAtMs: null,
  invalidReason: null,
  suspectReason: null,
  aliases: [],
});

async function requireSame(
  tx: Tx,
  request: PublishRequest,
  fingerprint: string,
  published: Snapshot,
): Promise<void> {
  const same =
    published.contentId === request.contentId &&
    published.sourceVm === request.sourceVm &&
    published.nodeId === request.nodeId;
  // A retired snapshot's content may be gone; then its id is all there is to compare.
  const existing = await findFingerprint(tx, request.contentId);
  if (!same || (existing !== undefined && existing !== fingerprint)) {
    refuse(
      'snapshot-conflict',
      request.snapshotId,
      `snapshot ${request.snapshotId} is already published with other content`,
    );
  }
}

async function insertNew(
  tx: Tx,
  request: PublishRequest,
  fingerprint: string,
  uploads: ReadonlyMap<ArtifactKey, StoredArtifact>,
  used: Set<ArtifactKey>,
): Promise<Snapshot> {
  if ((await findAlias(tx, request.snapshotId)) !== undefined) {
    refuse('snapshot-conflict', request.snapshotId, `${request.snapshotId} is an alias already`);
  }
  const { planned: newLayers, marks } = await planLayers(tx, request);
  for (const { artifact } of newLayers) useUpload(artifact, uploads, used);
  const existing = await findFingerprint(tx, request.contentId, 'key-share');
  if (existing !== undefined && existing !== fingerprint) {
    refuse(
      'content-conflict',
      request.contentId,
      `content ${request.contentId} exists with other heads or objects`,
    );
  }
  if (existing === undefined) {
    useUpload(request.manifest, uploads, used);
    await useArtifacts(tx, request, uploads, used);
  }
  await insertArtifacts(
    tx,
    [...used].flatMap((key) => uploads.get(key) ?? []),
  );
  await insertLayers(tx, newLayers);
  if (existing === undefined) {
    await insertContent(tx, {
      id: request.contentId,
      fingerprint,
      manifestKey: request.manifest.key,
      heads: request.heads,
      artifacts: request.artifacts,
    });
  }
  const suspectReason = request.heads.map(({ layer }) => marks.get(layer)).find((r) => r != null);
  const snapshot = { ...newSnapshot(request), suspectReason: suspectReason ?? null };
  await insertSnapshot(tx, snapshot);
  return snapshot;
}

interface PlannedLayers {
  readonly planned: readonly Omit<Layer, 'createdAtMs'>[];
  /** Of every layer that the request names. */
  readonly marks: ReadonlyMap<LayerUuid, string | null>;
}

/** The layers to insert, with their depths. Refuses what contradicts the catalog. */
async function planLayers(tx: Tx, request: PublishRequest): Promise<PlannedLayers> {
  const mentioned = new Set<LayerUuid>(request.heads.map(({ layer }) => layer));
  for (const { uuid, predecessor } of request.layers) {
    mentioned.add(uuid);
    if (predecessor !== null) mentioned.add(predecessor);
  }
  const existing = await findLayers(tx, [...mentioned]);
  const known = new Map(existing.map((layer) => [layer.uuid, layer]));
  const marks = inheritedMarks(
    request.layers,
    new Map(existing.map(({ uuid, suspectReason }) => [uuid, suspectReason])),
  );
  const depths = new Map(existing.map(({ uuid, depth }) => [uuid, depth]));
  const planned: Omit<Layer, 'createdAtMs'>[] = [];
  for (const layer of request.layers) {
    const before = known.get(layer.uuid);
    if (before !== undefined) {
      requireSameLayer(before, layer);
      continue;
    }
    const depth = 1 + (layer.predecessor === null ? 0 : depthOf(depths, layer.predecessor));
    if (depth > CHAIN_LAYERS_MAX) {
      const message = `layer ${layer.uuid} would be number ${depth} of its chain`;
      refuse('chain-too-deep', layer.uuid, `${message}; the limit is ${CHAIN_LAYERS_MAX}`);
    }
    depths.set(layer.uuid, depth);
    const suspectReason = marks.get(layer.uuid) ?? null;
    planned.push({ ...layer, depth, suspectReason, complete: layer.complete === true });
  }
  for (const { layer } of request.heads) depthOf(depths, layer);
  return { planned, marks };
}

function depthOf(depths: ReadonlyMap<LayerUuid, number>, uuid: LayerUuid): number {
  return (
    depths.get(uuid) ??
    refuse('layer-missing', uuid, `layer ${uuid} is not in the catalog (any more)`)
  );
}

function requireSameLayer(before: Layer, layer: NewLayer): void {
  const same =
    before.predecessor === layer.predecessor &&
    before.virtualBytes === layer.virtualBytes &&
    before.artifact.digest === layer.artifact.digest &&
    before.artifact.sizeBytes === layer.artifact.sizeBytes;
  if (!same) {
    const message = `layer ${layer.uuid} exists with another predecessor, size or digest`;
    refuse('layer-conflict', layer.uuid, message);
  }
}

function useUpload(
  artifact: StoredArtifact,
  uploads: ReadonlyMap<ArtifactKey, StoredArtifact>,
  used: Set<ArtifactKey>,
): void {
  const upload = uploads.get(artifact.key);
  if (upload === undefined) {
    const message = `no upload of ${artifact.key} is recorded (any more): store it under a new key`;
    return refuse('upload-missing', artifact.key, message);
  }
  requireSameArtifact(upload, artifact);
  used.add(artifact.key);
}

function requireSameArtifact(known: StoredArtifact, artifact: StoredArtifact): void {
  if (known.sizeBytes !== artifact.sizeBytes || known.digest !== artifact.digest) {
    const message = `${artifact.key} was recorded with another size or digest`;
    refuse('artifact-conflict', artifact.key, message);
  }
}

/** Other objects are new uploads, or ones that the catalog has and that several contents share. */
async function useArtifacts(
  tx: Tx,
  request: PublishRequest,
  uploads: ReadonlyMap<ArtifactKey, StoredArtifact>,
  used: Set<ArtifactKey>,
): Promise<void> {
  const shared = request.artifacts.filter(({ artifact }) => !uploads.has(artifact.key));
  const keys = shared.map(({ artifact }) => artifact.key);
  const known = await findArtifacts(tx, keys, 'key-share');
  for (const { artifact } of request.artifacts) {
    const existing = known.get(artifact.key);
    if (existing === undefined) useUpload(artifact, uploads, used);
    else requireSameArtifact(existing, artifact);
  }
}

/** True if the name is new, false if it already means this snapshot. */
async function nameSnapshot(tx: Tx, request: PublishRequest, alias: string): Promise<boolean> {
  const owner = await findAlias(tx, alias);
  if (owner === request.snapshotId) return false;
  await requireFreeAlias(tx, alias, owner);
  await insertAlias(tx, alias, request.snapshotId);
  return true;
}
