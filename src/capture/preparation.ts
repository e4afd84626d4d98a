/**
 * What a capture has in hand before it stops its VM: the durable intent, an open layer, a folder
 * for the VMM's files and, where equal pages are to be dropped, the parent's index. What can fail
 * for want of space, permission or sense fails here, with the VM running.
 */
import { randomUUID } from 'node:crypto';
import { join } from 'node:path';
import { crashPoint } from '../crash-points.ts';
import { sharedDepth } from '../lineage/compaction-plan.ts';
import type { EpochIntent } from '../lineage/epochs.ts';
import type { SharedStack } from '../layer/shared-stack.ts';
import { LayerWriter } from '../layer/layer-writer.ts';
import type { MemoryLayout } from '../memory.ts';
import type { Cleanups } from '../pipeline/cleanups.ts';
import { Failure } from '../result.ts';
import { layerUuid, type Bytes, type CaptureId, type LayerUuid } from '../units.ts';
import type { DirtySource, ParentPages } from '../vmm/source.ts';
import { identityError } from '../vmm/identity.ts';
import { StillGuest } from '../vmm/still-guest.ts';
import { orThrow } from './failure.ts';
import { openChain } from './open-chain.ts';
import { parentPages } from './parent-pages.ts';
import type { RunDeps } from './run.ts';
import { layerPath, makeStagingFolder, vmmFolder } from './staging.ts';
import type { CaptureRequest } from './types.ts';
import type { VmHandle } from './vm-handle.ts';

export interface Prepared {
  readonly intent: EpochIntent;
  readonly predecessor: LayerUuid | null;
  readonly layout: MemoryLayout;
  readonly writer: LayerWriter;
  readonly layerPath: string;
  readonly folder: string;
  readonly statePath: string;
  readonly memFilePath: string;
  /** When it was prepared; asked again right before the pause. */
  readonly pausedByOwner: boolean;
  readonly still: StillGuest;
  /** The open memory parent. */
  readonly parentStack: SharedStack | null;
  /** Set when equal pages are dropped. */
  readonly dedupAgainst: SharedStack | null;
  /** What the memory parent stores. */
  readonly parentPages: ParentPages | 'none';
}

export interface PreparationOf {
  readonly vm: VmHandle;
  readonly captureId: CaptureId;
  readonly request: CaptureRequest;
  readonly deps: RunDeps;
  readonly signal: AbortSignal;
  readonly cleanups: Cleanups;
}

export async function prepare(of: PreparationOf): Promise<Prepared> {
  const { vm, captureId, deps, signal, cleanups } = of;
  const { config, nodeDb, engine } = deps;
  await vm.settling;
  await deps.compactor.admit(vm.vmId, signal);
  const check = vm.identity.check();
  if (check !== 'same') throw new Failure(identityError(vm.identity, check));
  cleanups.use(vm.client.keepConnections());
  const pausedByOwner = await vm.isPaused(signal);
  const layout = orThrow(await vm.source.layout(signal));
  if (layout.imageBytes === 0) {
    throw new Failure({ kind: 'no-memory', message: `VM ${vm.vmId} has no memory to capture` });
  }
  requireSameSize(vm, nodeDb.getVm(vm.vmId)?.imageBytes ?? null, layout);
  cleanups.use(await engine.enter('commit', signal));
  const folder = await makeStagingFolder(config, captureId, vm.identity.uid);
  await deps.entry?.makeFolder();
  crashPoint('folder-made');
  const uuid = layerUuid(randomUUID());
  const path = layerPath(config, uuid);
  const memFilePath = join(vmmFolder(folder), 'memory');
  const intent = orThrow(
    nodeDb.begin(vm.vmId, captureId, {
      clearsOnRead: vm.source.clearsOnRead,
      forgetsCommitted: vm.source.epochs !== null,
      bytesIn: vm.source.dialect === 'firecracker' ? 'file' : 'process',
      advance: config.lineage.advance,
      scratchPaths: [folder, path],
    }),
  );
  crashPoint('intent-recorded');
  const predecessor = intent.memoryParent?.head ?? null;
  const writer = await LayerWriter.create({
    path,
    uuid,
    parentUuid: predecessor,
    virtualBytes: layout.imageBytes,
    compression: config.memorySnapshot.compression,
    blockBytes: config.memorySnapshot.blockBytes,
  });
  cleanups.useAsync(writer);
  const parent = await openParent(of, intent, layout.imageBytes);
  return {
    intent,
    predecessor,
    layout,
    writer,
    layerPath: path,
    folder,
    statePath: join(vmmFolder(folder), 'vm-state'),
    memFilePath,
    pausedByOwner,
    still: await stillGuest(of),
    ...parent,
  };
}

async function stillGuest({ vm, captureId, deps }: PreparationOf): Promise<StillGuest> {
  const still = await StillGuest.of({ pid: vm.identity.pid, clock: deps.clock });
  if (!still.counts) {
    const what = 'whether a guest runs while it is captured can only be asked, not counted';
    deps.observer.warn(what, { captureId, vm: vm.vmId });
  }
  return still;
}

/** Across daemons the size is what is known of the layout before. */
function requireSameSize(vm: VmHandle, before: number | null, layout: MemoryLayout): void {
  if (before === null || before === layout.imageBytes) return;
  const message =
    `the memory layout of VM ${vm.vmId} changed: it has ${layout.imageBytes} bytes of memory ` +
    `now, ${before} at its last capture`;
  throw new Failure({ kind: 'layout-changed', message });
}

function wantsDedup(of: PreparationOf, source: DirtySource): boolean {
  const mode = of.request.dedup ?? of.deps.config.memorySnapshot.dedup;
  if (mode === 'off') return false;
  return mode === 'parent' || source.cumulative;
}

async function openParent(
  of: PreparationOf,
  intent: EpochIntent,
  imageBytes: Bytes,
): Promise<Pick<Prepared, 'dedupAgainst' | 'parentPages' | 'parentStack'>> {
  const { memoryParent } = intent;
  if (memoryParent === null) {
    return { parentStack: null, dedupAgainst: null, parentPages: 'none' };
  }
  const paths = memoryParent.layers.map((layer) => layer.path);
  const stack = orThrow(await openChain(memoryParent));
  of.cleanups.useAsync(stack);
  const launch = of.deps.nodeDb.launchChain(of.vm.vmId)?.layers ?? [];
  const launchDepth = sharedDepth(memoryParent.layers, launch);
  const pages = await parentPages(stack, paths, launchDepth, imageBytes);
  // Equal pages are dropped after a widening too: it selects all that may differ. So does a set whose
  // launch parent cannot be told any more from what lies above it.
  const wide = intent.widen !== null || launchDepth < launch.length;
  const dedup = wide || wantsDedup(of, of.vm.source);
  const shared = stack.shared();
  return { parentStack: shared, dedupAgainst: dedup ? shared : null, parentPages: pages };
}
