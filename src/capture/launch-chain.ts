/**
 * The chain a VM process was started from, as local files. Read under a catalog hold, so that
 * nothing of it is deleted while the VM lives; layers that this node already has are used as they
 * are.
 */
import { join } from 'node:path';
import type { ArtifactStore } from '../artifact/store.ts';
import type { Catalog, Layer } from '../catalog/catalog.ts';
import type { Config } from '../config/schema.ts';
import type { LayerRef } from '../lineage/layers.queries.ts';
import type { NodeDb } from '../lineage/node-db.ts';
import { Failure } from '../result.ts';
import type { HoldId, NodeId } from '../units.ts';
import { orThrow } from './failure.ts';

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
  const layers: LayerRef[] = [];
  for (const layer of chain) layers.push(await localLayer(deps, layer, signal));
  return { layers, contentId: held.contentId };
}

async function localLayer(deps: ChainDeps, layer: Layer, signal: AbortSignal): Promise<LayerRef> {
  const known = deps.nodeDb.findLayer(layer.uuid);
  const { artifact } = layer;
  const facts = {
    uuid: layer.uuid,
    parentUuid: layer.predecessor,
    digest: artifact.digest,
    sizeBytes: artifact.sizeBytes,
    virtualBytes: layer.virtualBytes,
  };
  if (known?.digest === artifact.digest) return { ...facts, path: known.path };
  const path = join(deps.config.paths.layers, `${layer.uuid}.lsmt`);
  orThrow(await deps.store.fetch(artifact, path, signal));
  return { ...facts, path };
}
