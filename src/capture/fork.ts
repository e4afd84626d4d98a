/**
 * A fork: one capture, then children started from it. Its layer becomes the memory parent of the
 * source and the launch parent of each child. A child that fails to start takes nothing else down.
 */
import { randomUUID } from 'node:crypto';
import { confinePath } from '../config/roots.ts';
import { crashPoint } from '../crash-points.ts';
import type { Clock } from '../clock.ts';
import { resumeRetryWaitsMs } from '../pipeline/freeze.ts';
import { materialise } from '../restore/materialise.ts';
import { Failure, err, ok, type FailureDetail, type Result } from '../result.ts';
import { captureId as toCaptureId } from '../units.ts';
import type { CaptureId, LayerUuid, SnapshotId, VmId } from '../units.ts';
import { VmmClient } from '../vmm/client.ts';
import { isGone, letRun } from '../vmm/let-run.ts';
import type { TrackingMode } from '../vmm/source.ts';
import { bindVm, vmmTimeouts } from './attach.ts';
import { failureOf, orThrow } from './failure.ts';
import { durableHolds, type ChainDeps } from './launch-chain.ts';
import type { LaunchFiles, NewEntry, PreparedEntries } from './prepared-entries.ts';
import { parsePublishPlan } from './publish-plan.ts';
import { refused, stoppingError } from './refusals.ts';
import { takeUp, takeUpFrom, type TakeUpDeps } from './take-up.ts';
import type { CaptureEvent, CaptureRequest, CaptureResult, CaptureView } from './types.ts';
import type { ForkRequest, ForkView, Outcome, VmView } from './types.ts';
import type { VmHandle } from './vm-handle.ts';

export interface ForkDeps extends TakeUpDeps, ChainDeps {
  readonly clock: Clock;
  readonly prepared: PreparedEntries;
  readonly startCapture: (
    vm: VmId,
    request: CaptureRequest,
    entry: NewEntry,
  ) => Promise<Outcome<CaptureView>>;
  /** Until the capture ends, or the daemon stops: then it throws. */
  readonly watch: (capture: CaptureId) => AsyncIterable<CaptureEvent>;
  readonly getCapture: (capture: CaptureId) => CaptureView | undefined;
  /** Until a capture that runs here is committed, or cannot be any more. Never rejects. */
  readonly decided: (capture: CaptureId) => Promise<void>;
  /** Takes a child that was attached off the record again. */
  readonly detach: (child: VmId) => Promise<Outcome<null>>;
  /** Its needs are over. */
  readonly ended: () => Promise<void>;
  readonly stopping: AbortSignal;
}

/** Where children come from. */
interface Origin {
  /** Makes what they are started from. */
  readonly prepare: () => Promise<LaunchFiles>;
  /** Takes a child up; it is paused, with all it wrote since its load in its tracking. */
  readonly attach: (child: VmHandle) => Promise<Outcome<VmView>>;
}

type Child = ForkRequest['children'][number];
type ForkedChild = ForkView['children'][number];

/**
 * Answers once each child has been tried. They are started from the layers of this node as soon as
 * the capture is committed, and its publish goes on meanwhile: no outage of the catalog or the store
 * stops them, and the answer may show the capture as `committed`. Never rejects.
 */
export async function forkVm(
  deps: ForkDeps,
  vm: VmId,
  { children, ...request }: ForkRequest,
): Promise<Outcome<ForkView>> {
  const entry = deps.prepared.begin(randomUUID());
  try {
    const started = await deps.startCapture(vm, request, entry);
    if (!started.ok) return started;
    const { captureId } = started.value;
    // Else the key was used before, perhaps in an earlier life: nothing local was kept for this call.
    const isNew = captureId === entry.preparedId;
    const capture = await reached(deps, captureId, isNew ? 'committed' : 'published');
    if (!capture.ok) return capture;
    const { layer, snapshotId } = capture.value;
    const origin = isNew ? fromLayer(deps, layer, entry) : fromSnapshot(deps, snapshotId, entry);
    const made = await startChildren(deps, origin, modeOf(deps, captureId), children);
    const now = deps.getCapture(captureId);
    return now === undefined ? refused(noResult) : ok({ capture: now, children: made });
  } catch (error) {
    return refused(deps.stopping.aborted ? stoppingError() : failureOf(error));
  } finally {
    // A commit makes the entry an owner: it must not come after the end.
    await deps.decided(toCaptureId(entry.preparedId));
    await deps.prepared.end(entry.preparedId);
    await deps.ended();
  }
}

/** That of the committed capture: the source may be detached by now, or not be found again. */
function modeOf({ nodeDb }: ForkDeps, captureId: CaptureId): TrackingMode {
  const json = nodeDb.getJob(captureId)?.publishJson ?? null;
  if (json === null) throw new Error(`capture ${captureId} has no publish plan`);
  return parsePublishPlan(json).vmm.trackingMode;
}

const noResult = { kind: 'internal', message: 'the capture has no result' };

/** The result of a capture that got so far, or why it did not. */
async function reached(
  deps: ForkDeps,
  captureId: CaptureId,
  step: 'committed' | 'published',
): Promise<Outcome<CaptureResult>> {
  for await (const event of deps.watch(captureId)) {
    if (event.type === 'status' && event.capture.status === step) break;
  }
  const capture = deps.getCapture(captureId);
  const isThere = capture?.status === 'published' || capture?.status === step;
  if (isThere && capture.result !== null) return ok(capture.result);
  return refused(capture?.failure ?? noResult);
}

/** From layers that are here, under the lease and the hold of the entry: asks nobody. */
function fromLayer({ nodeDb, ...deps }: ForkDeps, layer: LayerUuid, entry: NewEntry): Origin {
  const chain = nodeDb.chainOf(layer);
  if (chain === null) throw new Error('the layer is leased for the entry');
  const { hold, preparedId } = entry;
  const launched = { layers: chain.layers, hold, preparedId, byUs: true };
  return {
    prepare: async () => {
      await entry.flatten(chain, deps.stopping);
      return entry;
    },
    attach: (child) => Promise.resolve(takeUp({ ...deps, nodeDb }, child, launched)),
  };
}

/** Like any restore: what the capture had here may be gone, and its hold with it. */
function fromSnapshot(deps: ForkDeps, snapshot: SnapshotId, entry: NewEntry): Origin {
  const { stopping, nodeDb } = deps;
  const { folder, preparedId } = entry;
  const request = { snapshot, folder, signal: stopping };
  return {
    prepare: () => materialise({ ...deps, holds: durableHolds(nodeDb) }, request),
    attach: (child) => takeUpFrom(deps, snapshot, child, { byUs: true, preparedId }, stopping),
  };
}

/** Starts every child; waits for all. Never rejects. */
async function startChildren(
  deps: ForkDeps,
  origin: Origin,
  mode: TrackingMode,
  children: readonly Child[],
): Promise<readonly ForkedChild[]> {
  const started: ForkedChild[] = [];
  try {
    const files = await origin.prepare();
    crashPoint('fork-materialised');
    const load = loader(deps, origin, files, mode);
    for (const child of children) started.push(await startChild(load, child));
  } catch (error) {
    const failure = failureOf(error);
    const rest = children.slice(started.length);
    started.push(...rest.map(({ socketPath }) => ({ socketPath, vm: null, failure })));
  }
  return started;
}

type Load = (child: Child) => Promise<Result<Loaded, FailureDetail>>;

/** On record. With a failure it may still be paused: it could not be resumed, nor detached. */
type Loaded = Pick<ForkedChild, 'failure'> & { readonly vm: VmView };

async function startChild(load: Load, child: Child): Promise<ForkedChild> {
  const { socketPath } = child;
  try {
    return { socketPath, ...orThrow(await load(child)) };
  } catch (error) {
    return { socketPath, vm: null, failure: failureOf(error) };
  }
}

function loader(deps: ForkDeps, origin: Origin, files: LaunchFiles, mode: TrackingMode): Load {
  const { config, stopping } = deps;
  return async (child) => {
    const socket = confinePath(child.socketPath, config.paths.socketRoots);
    if (!socket.ok) return socket;
    if (files.vmStatePath === null) {
      return err({ kind: 'snapshot-without-vm-state', message: 'the snapshot has no VM state' });
    }
    const timeoutsMs = vmmTimeouts(config);
    const client = new VmmClient({ socketPath: socket.value, timeoutsMs });
    const loaded = await client.loadSnapshot(
      {
        snapshotPath: files.vmStatePath,
        memory: { backend: 'File', path: files.memoryPath },
        trackDirtyPages: true,
        resume: false,
      },
      stopping,
    );
    if (!loaded.ok) return err(await afterLoad(client, loaded.error, stopping));
    const bound = await bindVm(config, { ...child, trackingMode: mode }, stopping);
    if (!bound.ok) return bound;
    const attached = await origin.attach(bound.value);
    crashPoint('fork-child-attached');
    if (!attached.ok) return attached;
    return run(deps, bound.value, attached.value);
  };
}

/**
 * A load that failed may have happened all the same. Such a VM is not used: what it has in its memory
 * is not known. It has never run; its owner is told.
 */
async function afterLoad(
  client: VmmClient,
  error: FailureDetail,
  signal: AbortSignal,
): Promise<FailureDetail> {
  if (isGone(error)) return error;
  const state = await client.state(signal);
  if (!state.ok || state.value === 'Not started') return error;
  const message = `${error.message}; its VM is ${state.value} now, and is not used: start a new VMM`;
  return { kind: error.kind, message };
}

/** Resumes an attached child. One that cannot be is not kept: the failure is all that is left. */
async function run(
  deps: ForkDeps,
  { client, vmId }: VmHandle,
  vm: VmView,
): Promise<Result<Loaded, FailureDetail>> {
  try {
    await resume(deps, client);
    return ok({ vm, failure: null });
  } catch (error) {
    const failure = failureOf(error);
    const detached = await deps.detach(vmId);
    return detached.ok ? err(failure) : ok({ vm, failure });
  }
}

/** Throws `Failure`, or the reason of `stopping`. */
async function resume({ clock, stopping }: ForkDeps, client: VmmClient): Promise<void> {
  for (let attempt = 0; ; attempt++) {
    const resumed = await letRun(client, stopping);
    if (resumed.ok) return;
    const waitMs = resumeRetryWaitsMs[attempt];
    if (isGone(resumed.error) || waitMs === undefined) throw new Failure(resumed.error);
    await clock.sleep(waitMs, stopping);
  }
}
