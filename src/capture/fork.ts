/**
 * A fork: one capture, then children restored from it. Its layer becomes the memory parent of the
 * source and the launch parent of each child. A child that fails to start takes nothing else down.
 */
import { rm } from 'node:fs/promises';
import { join } from 'node:path';
import type { Config } from '../config/schema.ts';
import { confinePath } from '../config/roots.ts';
import { crashPoint } from '../crash-points.ts';
import { materialise, type Materialised, type MaterialiseDeps } from '../restore/materialise.ts';
import { err, ok, type FailureDetail, type Result } from '../result.ts';
import type { CaptureId } from '../units.ts';
import { VmmClient } from '../vmm/client.ts';
import type { TrackingMode } from '../vmm/source.ts';
import { bindVm, vmmTimeouts } from './attach.ts';
import { failureOf, orThrow } from './failure.ts';
import { preparedRoot } from './staging.ts';
import type { ForkRequest, ForkView, Outcome, VmView } from './types.ts';
import type { VmHandle } from './vm-handle.ts';

export interface ForkDeps extends MaterialiseDeps {
  readonly config: Config;
  readonly trackingMode: TrackingMode;
  /** Takes the child up; it is paused, with all it wrote since its load in its tracking. */
  readonly attach: (child: VmHandle, prepared: string) => Promise<Outcome<VmView>>;
}

export type ForkedChild = ForkView['children'][number];

/** Where the memory file of a fork's children is, for as long as one of them is attached. */
export function preparedFolder(config: Config, captureId: CaptureId): string {
  return join(preparedRoot(config), captureId);
}

/** Starts every child; waits for all. The folder stays only if a child uses it. */
export async function startChildren(
  deps: ForkDeps,
  captureId: CaptureId,
  snapshot: string,
  children: ForkRequest['children'],
  signal: AbortSignal,
): Promise<readonly ForkedChild[]> {
  const folder = preparedFolder(deps.config, captureId);
  const started: ForkedChild[] = [];
  try {
    const files = await materialise(deps, { snapshot, folder, signal });
    crashPoint('fork-materialised');
    for (const child of children)
      started.push(await startChild(deps, files, folder, child, signal));
  } catch (error) {
    const failure = failureOf(error);
    const rest = children.slice(started.length);
    started.push(...rest.map(({ socketPath }) => ({ socketPath, vm: null, failure })));
  }
  if (started.every((child) => child.vm === null)) {
    await rm(folder, { recursive: true, force: true });
  }
  return started;
}

async function startChild(
  deps: ForkDeps,
  files: Materialised,
  folder: string,
  child: ForkRequest['children'][number],
  signal: AbortSignal,
): Promise<ForkedChild> {
  const { socketPath } = child;
  try {
    const vm = orThrow(await loadAndAttach(deps, files, folder, child, signal));
    return { socketPath, vm, failure: null };
  } catch (error) {
    return { socketPath, vm: null, failure: failureOf(error) };
  }
}

async function loadAndAttach(
  deps: ForkDeps,
  files: Materialised,
  folder: string,
  child: ForkRequest['children'][number],
  signal: AbortSignal,
): Promise<Result<VmView, FailureDetail>> {
  const { config, trackingMode } = deps;
  const socket = confinePath(child.socketPath, config.paths.socketRoots);
  if (!socket.ok) return socket;
  if (files.vmStatePath === null) {
    return err({ kind: 'snapshot-without-vm-state', message: 'the snapshot has no VM state' });
  }
  const client = new VmmClient({
    socketPath: socket.value,
    timeoutsMs: vmmTimeouts(config),
  });
  const loaded = await client.loadSnapshot(
    {
      snapshotPath: files.vmStatePath,
      memory: { backend: 'File', path: files.memoryPath },
      trackDirtyPages: true,
      resume: false,
    },
    signal,
  );
  if (!loaded.ok) return loaded;
  const bound = await bindVm(config, { ...child, trackingMode }, signal);
  if (!bound.ok) return bound;
  const attached = await deps.attach(bound.value, folder);
  if (!attached.ok) return attached;
  const resumed = await bound.value.client.resume(signal);
  return resumed.ok ? ok(attached.value) : resumed;
}
