/**
 * Rebuilds a snapshot's runtime input on this node: one flat, sparse memory file and the VM state
 * file, as a VMM's `snapshot/load` takes them; and beside them what OverlayBD consumers open. Every
 * byte is checked against the digest that the catalog names before it is used. All is read under a
 * hold, so that a snapshot that is retired meanwhile is still read to its end.
 */
import { randomUUID } from 'node:crypto';
import { constants } from 'node:fs';
import { lstat, mkdir, mkdtemp, open, rm, rmdir } from 'node:fs/promises';
import { join } from 'node:path';
import { decodeManifest, manifestBytesMax, type Manifest } from '../artifact/manifest.ts';
import type { ArtifactStore } from '../artifact/store.ts';
import type { Catalog, Layer } from '../catalog/catalog.ts';
import { flattenStack, type Progress } from '../layer/flatten.ts';
import { LayerStack } from '../layer/layer-stack.ts';
import { Failure, systemCode, type FailureDetail, type Result } from '../result.ts';
import { bytes, holdId, type HoldId, type NodeId } from '../units.ts';
import { exportOverlaybd, overlaybdFiles } from './overlaybd-export.ts';
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
  const memoryPath = join(folder, 'memory');
  const vmStatePath = join(folder, 'vm-state');
  await requireFree(folder, ['memory', 'vm-state', ...overlaybdFiles]);
  await using made = await MadeFiles.in(folder);
  const vmState = content.artifacts.find((each) => each.name === 'vm-state')?.artifact ?? null;
  await flatten(deps, chain, memoryPath, request);
  made.add(memoryPath);
  if (vmState !== null) {
    orFail(await store.fetch(vmState, vmStatePath, signal));
    made.add(vmStatePath);
    await makePrivate(vmStatePath);
  }
  orFail(await exportOverlaybd(store, chain, folder, (path) => made.add(path)));
  signal.throwIfAborted();
  made.keep();
  return {
    snapshotId: snapshot.id,
    manifest,
    memoryPath,
    vmStatePath: vmState === null ? null : vmStatePath,
  };
}

/** It holds what was in the guest's registers and devices; the store's own copy is readable. */
async function makePrivate(path: string): Promise<void> {
  const file = await open(path, constants.O_RDONLY | constants.O_NOFOLLOW);
  try {
    await file.chmod(0o600);
  } finally {
    await file.close();
  }
}

/** Refuses before anything is written: what is there is somebody's. */
async function requireFree(folder: string, names: readonly string[]): Promise<void> {
  for (const name of names) {
    const path = join(folder, name);
    const there = await lstat(path).catch((error: unknown) => {
      if (systemCode(error) === 'ENOENT') return null;
      throw error;
    });
    if (there === null) continue;
    const message = `${path} exists already: restore into another folder, or remove it first`;
    throw new Failure({ kind: 'restore-target-exists', message });
  }
}

/** What one call made in a folder; disposal removes it, and nothing else, unless it is kept. */
class MadeFiles implements AsyncDisposable {
  readonly #paths: string[] = [];
  readonly #folder: string | null;
  #kept = false;

  /** @param folder set where this call made it */
  private constructor(folder: string | null) {
    this.#folder = folder;
  }

  static async in(folder: string): Promise<MadeFiles> {
    const made = await mkdir(folder, { recursive: true, mode: 0o700 });
    return new MadeFiles(made === undefined ? null : folder);
  }

  add(...paths: readonly string[]): void {
    this.#paths.push(...paths);
  }

  keep(): void {
    this.#kept = true;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    if (this.#kept) return;
    for (const path of this.#paths) await rm(path, { force: true });
    // Only where it is empty: somebody may have put something in it meanwhile.
    if (this.#folder !== null) await rmdir(this.#folder).catch(() => undefined);
  }
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
