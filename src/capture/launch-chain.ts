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
import type { LayerRef } from '../lineage/layers.queries.ts';
import type { NodeDb } from '../lineage/node-db.ts';
import { Failure } from '../result.ts';
import type { HoldId, NodeId } from '../units.ts';
import { orThrow } from './failure.ts';
import { LAYER_SUFFIX } from './staging.ts';

export interface ChainDeps {
  readonly config: Config;
  readonly catalog: Catalog;
  readonly store: ArtifactStore;
  readonly nodeDb: NodeDb;
  readonly nodeId: NodeId;
}

export interface LocalChain {
  /** Bottom to top. */
  readonly layers: readonly LayerRef[];
  readonly contentId: string;
  /** Those of them that were fetched for this. */
  readonly fetched: readonly LayerRef[];
}

/** Holds the snapshot for `purpose`, then makes its memory chain local. Throws `Failure`. */
export async function localChain(
  deps: ChainDeps,
  snapshot: string,
  hold: { readonly holdId: HoldId; readonly purpose: string },
  signal: AbortSignal,
): Promise<LocalChain> {
  const { catalog, nodeId } = deps;
  const held = orThrow(await catalog.hold({ ...hold, nodeId, target: { snapshot } }));
  if (held.contentId === null) throw new Error('an open hold names its content');
  const content = orThrow(await catalog.findContent(held.contentId));
  const head = content.heads.find((each) => each.role === 'memory');
  if (head === undefined) {
    const message = `snapshot ${snapshot} has no memory`;
    throw new Failure({ kind: 'snapshot-without-memory', message });
  }
  const chain = orThrow(await catalog.lineage(head.layer));
  const layers = leaseKnown(deps, chain, hold.holdId);
  const fetched: LayerRef[] = [];
  try {
    for (const layer of chain.slice(layers.length)) fetched.push(await fetch(deps, layer, signal));
  } catch (error) {
    await dropFetched(deps, fetched);
    throw error;
  }
  return { layers: [...layers, ...fetched], contentId: held.contentId, fetched };
}

/** Ends the lease, and removes fetched files that no record took up. */
export async function endLease(
  deps: ChainDeps,
  holdId: HoldId,
  chain: LocalChain | null,
): Promise<void> {
  orThrow(deps.nodeDb.dropLeases('restore', holdId));
  if (chain !== null) await dropFetched(deps, chain.fetched);
}

async function dropFetched(deps: ChainDeps, fetched: readonly LayerRef[]): Promise<void> {
  for (const { uuid, path } of fetched) {
    if (deps.nodeDb.findLayer(uuid)?.path !== path) await rm(path, { force: true });
  }
}

/** The part of a chain, from its bottom, that this node has; nothing deletes it from now on. */
function leaseKnown(deps: ChainDeps, chain: readonly Layer[], holdId: HoldId): LayerRef[] {
  const known: LayerRef[] = [];
  for (const layer of chain) {
    const local = deps.nodeDb.findLayer(layer.uuid);
    if (local?.digest !== layer.artifact.digest) break;
    known.push({ ...refOf(layer), path: local.path });
  }
  const head = known.at(-1);
  if (head !== undefined) orThrow(deps.nodeDb.takeLease('restore', holdId, head.uuid));
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
