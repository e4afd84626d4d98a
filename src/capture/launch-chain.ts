/**
 * The chain a VM process was started from, as local files. Read under a catalog hold, so that
 * nothing of it is deleted while the VM lives; layers that this node already has are used as they
 * are, under a lease until the VM's record names them.
 */
import { randomUUID } from 'node:crypto';
import { rm } from 'node:fs/promises';
import { join } from 'node:path';
import type { ArtifactStore } from '../artifact/store.ts';
import type { Catalog, Layer } from '../catalog/catalog.ts';
import type { Config } from '../config/schema.ts';
import { crashPoint } from '../crash-points.ts';
import type { LayerRef } from '../lineage/layers.queries.ts';
import type { NodeDb } from '../lineage/node-db.ts';
import type { RestoreHolds } from '../restore/restore-hold.ts';
import { Failure } from '../result.ts';
import { holdId, type HoldId, type NodeId } from '../units.ts';
import { failureOf, orThrow } from './failure.ts';
import type { CaptureObserver } from './observer.ts';
import { LAYER_SUFFIX } from './staging.ts';

export interface ChainDeps {
  readonly config: Config;
  readonly catalog: Catalog;
  readonly store: ArtifactStore;
  readonly nodeDb: NodeDb;
  readonly nodeId: NodeId;
  readonly observer: Pick<CaptureObserver, 'warn'>;
}

export interface LocalChain {
  /** Bottom to top. */
  readonly layers: readonly LayerRef[];
  readonly hold: HoldId;
  /** Those of them that were fetched for this. */
  readonly fetched: readonly LayerRef[];
}

/**
 * Lends `use` the memory chain of a snapshot, made local and held for VMs. What `use` leaves in
 * node.db (a VM that owns the hold and sits on the layers) stays; where it leaves nothing, the hold's
 * release is queued and the fetched files go. That also happens if the daemon dies in between (H4 of
 * holds.queries.ts). Throws `Failure`.
 */
export async function withLocalChain<T>(
  deps: ChainDeps,
  snapshot: string,
  use: (chain: LocalChain) => T,
  signal: AbortSignal,
): Promise<T> {
  const { nodeDb } = deps;
  const hold = holdId(randomUUID());
  orThrow(nodeDb.ownHold(hold, { kind: 'restore', id: hold }));
  crashPoint('attach-hold-intended');
  let chain: LocalChain | null = null;
  try {
    chain = await localChain(deps, snapshot, hold, signal);
    crashPoint('attach-chain-local');
    return use(chain);
  } finally {
    await endRestore(deps, hold, chain?.fetched ?? []);
  }
}

/** Never rejects: a VM that is on record stays. What is left over goes when the daemon starts. */
async function endRestore(
  deps: ChainDeps,
  hold: HoldId,
  fetched: readonly LayerRef[],
): Promise<void> {
  try {
    orThrow(deps.nodeDb.endNeed('restore', hold));
    await dropFetched(deps, fetched);
  } catch (error) {
    const facts = { hold, error: failureOf(error) };
    deps.observer.warn('a restore is over, and its hold could not be given up yet', facts);
  }
}

/** For other reads of snapshots by this daemon: owned likewise. */
export function durableHolds(nodeDb: NodeDb): RestoreHolds {
  return {
    begin: (hold) => orThrow(nodeDb.ownHold(hold, { kind: 'restore', id: hold })),
    // What could not be recorded is ended by the next life of the daemon.
    end: (hold) => Promise.resolve(void nodeDb.endNeed('restore', hold)),
  };
}

async function localChain(
  deps: ChainDeps,
  snapshot: string,
  hold: HoldId,
  signal: AbortSignal,
): Promise<LocalChain> {
  const { catalog, nodeId } = deps;
  // The VM runs from it already: what it lacks, the VM lacks.
  const target = { snapshot };
  const request = { holdId: hold, purpose: 'vm', nodeId, target, allowSuspect: true };
  const held = orThrow(await catalog.hold(request));
  if (held.contentId === null) throw new Error('an open hold names its content');
  const content = orThrow(await catalog.findContent(held.contentId));
  const head = content.heads.find((each) => each.role === 'memory');
  if (head === undefined) {
    const message = `snapshot ${snapshot} has no memory`;
    throw new Failure({ kind: 'snapshot-without-memory', message });
  }
  const chain = orThrow(await catalog.lineage(head.layer));
  const layers = leaseKnown(deps, chain, hold);
  const fetched: LayerRef[] = [];
  try {
    for (const layer of chain.slice(layers.length)) fetched.push(await fetch(deps, layer, signal));
  } catch (error) {
    await dropFetched(deps, fetched);
    throw error;
  }
  return { layers: [...layers, ...fetched], hold, fetched };
}

/** Fetched files that no record took up. */
async function dropFetched(deps: ChainDeps, fetched: readonly LayerRef[]): Promise<void> {
  for (const { uuid, path } of fetched) {
    // One that cannot be removed is an orphan, and goes when the daemon starts.
    const isOurs = deps.nodeDb.findLayer(uuid)?.path !== path;
    if (isOurs) await rm(path, { force: true }).catch(() => undefined);
  }
}

/** The part of a chain, from its bottom, that this node has; nothing deletes it from now on. */
function leaseKnown(deps: ChainDeps, chain: readonly Layer[], hold: HoldId): LayerRef[] {
  const known: LayerRef[] = [];
  for (const layer of chain) {
    const local = deps.nodeDb.findLayer(layer.uuid);
    if (local?.digest !== layer.artifact.digest) break;
    known.push({ ...refOf(layer), path: local.path });
  }
  const head = known.at(-1);
  if (head !== undefined) orThrow(deps.nodeDb.takeLease('restore', hold, head.uuid));
  return known;
}

async function fetch(deps: ChainDeps, layer: Layer, signal: AbortSignal): Promise<LayerRef> {
  // Two VMs may want the same layer at once: each gets a file, and the first one recorded stays.
  const name = `${layer.uuid}.${randomUUID()}${LAYER_SUFFIX}`;
  const path = join(deps.config.paths.layers, name);
  orThrow(await deps.store.fetch(layer.artifact, path, signal));
  return { ...refOf(layer), path };
}

const refOf = ({ uuid, predecessor, artifact, virtualBytes }: Layer): Omit<LayerRef, 'path'> => ({
  uuid,
  parentUuid: predecessor,
  digest: artifact.digest,
  sizeBytes: artifact.sizeBytes,
  virtualBytes,
});
