/**
 * Rebuilds a snapshot's runtime input on this node: one flat, sparse memory file and the VM state
 * file, as a VMM's `snapshot/load` takes them; and beside them what OverlayBD consumers open. Every
 * byte is checked against the digest that the catalog names before it is used. All is read under a
 * hold, so that a snapshot that is retired meanwhile is still read to its end.
 */
import { randomUUID } from 'node:crypto';
import { mkdir, mkdtemp, rm } from 'node:fs/promises';
import { join } from 'node:path';
import { decodeManifest, manifestBytesMax, type Manifest } from '../artifact/manifest.ts';
import type { ArtifactStore } from '../artifact/store.ts';
import type { Catalog, Layer } from '../catalog/catalog.ts';
import { flattenStack, type Progress } from '../layer/flatten.ts';
import { LayerStack } from '../layer/layer-stack.ts';
import { exportOverlaybd, removeOverlaybd } from './overlaybd-export.ts';
import { Failure, type FailureDetail, type Result } from '../result.ts';
import { bytes, holdId, type HoldId, type NodeId } from '../units.ts';
import type { RestoreHolds } from './restore-hold.ts';

export interface MaterialiseDeps {
  readonly catalog: Catalog;
  readonly store: ArtifactStore;
  /** Registered in the catalog: its name is in the hold. */
  readonly nodeId: NodeId;
  readonly holds: RestoreHolds;
}

export interface Materialised {
  readonly snapshotId: string;
  readonly manifest: Manifest;
  /** Sparse; its size is the image's. */
  readonly memoryPath: string;
  /** Null where the snapshot has no VM state. */
  readonly vmStatePath: string | null;
}

export interface MaterialiseRequest {
  /** Snapshot id or alias. */
  readonly snapshot: string;
  /** Read also a snapshot that is marked suspect. Default: refused. */
  readonly allowSuspect?: boolean | undefined;
  /** Made if missing; the two files in it must not exist. */
  readonly folder: string;
  readonly signal: AbortSignal;
  readonly onProgress?: ((progress: Progress) => void) | undefined;
}

/** Throws `Failure`. Whatever was written is removed when it fails, and the hold released. */
export async function materialise(
  deps: MaterialiseDeps,
  request: MaterialiseRequest,
): Promise<Materialised> {
  const hold = holdId(randomUUID());
  deps.holds.begin(hold);
  try {
    return await readHeld(deps, request, hold);
  } finally {
    await deps.holds.end(hold);
  }
}

async function readHeld(
  deps: MaterialiseDeps,
  request: MaterialiseRequest,
  hold: HoldId,
): Promise<Materialised> {
  const { catalog, store, nodeId } = deps;
  const { signal, folder, allowSuspect } = request;
  const target = { snapshot: request.snapshot };
  const claim = { holdId: hold, nodeId, target, purpose: 'restore', allowSuspect };
  const held = orFail(await catalog.hold(claim));
  if (held.contentId === null) throw new Error('an open hold names its content');
  const snapshot = orFail(await catalog.show(request.snapshot));
  const content = orFail(await catalog.findContent(held.contentId));
  const read = orFail(await store.readAll(content.manifest, bytes(manifestBytesMax), signal));
  const manifest = orFail(decodeManifest(read, content.manifest.key));
  const head = content.heads.find((each) => each.role === 'memory');
  if (head === undefined) {
    const message = `snapshot ${snapshot.id} has no memory`;
    throw new Failure({ kind: 'snapshot-without-memory', message });
  }
  const chain = orFail(await catalog.lineage(head.layer));
  await mkdir(folder, { recursive: true });
  const memoryPath = join(folder, 'memory');
  const vmStatePath = join(folder, 'vm-state');
  const vmState = content.artifacts.find((each) => each.name === 'vm-state')?.artifact ?? null;
  try {
    await flatten(deps, chain, memoryPath, request);
    if (vmState !== null) orFail(await store.fetch(vmState, vmStatePath, signal));
    orFail(await exportOverlaybd(store, chain, folder));
  } catch (error) {
    await rm(memoryPath, { force: true });
    await rm(vmStatePath, { force: true });
    await removeOverlaybd(folder);
    throw error;
  }
  return {
    snapshotId: snapshot.id,
    manifest,
    memoryPath,
    vmStatePath: vmState === null ? null : vmStatePath,
  };
}

async function flatten(
  deps: MaterialiseDeps,
  chain: readonly Layer[],
  memoryPath: string,
  request: MaterialiseRequest,
): Promise<void> {
  const { signal } = request;
  const scratch = await mkdtemp(join(request.folder, 'layers-'));
  try {
    const paths: string[] = [];
    for (const layer of chain) paths.push(await localFile(deps.store, layer, scratch, signal));
    await using stack = orFail(await LayerStack.open(paths));
    const { onProgress } = request;
    orFail(await flattenStack(stack, { path: memoryPath, signal, onProgress }));
  } finally {
    await rm(scratch, { recursive: true, force: true });
  }
}

async function localFile(
  store: ArtifactStore,
  layer: Layer,
  scratch: string,
  signal: AbortSignal,
): Promise<string> {
  const path = store.localPath(layer.artifact.key);
  if (path !== null) {
    orFail(await store.verify(layer.artifact, signal));
    return path;
  }
  const copy = join(scratch, `${layer.uuid}.lsmt`);
  orFail(await store.fetch(layer.artifact, copy, signal));
  return copy;
}

function orFail<T, E extends FailureDetail>(result: Result<T, E>): T {
  if (result.ok) return result.value;
  throw new Failure(result.error);
}
