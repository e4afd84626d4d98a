/**
 * What the daemon does first: VMs that it had paused run again, captures abort or finish, attached
 * VMs are found again.
 */
import { readdir, rm, stat } from 'node:fs/promises';
import { basename, join } from 'node:path';
import type { Config } from '../config/schema.ts';
import type { CaptureJob } from '../lineage/jobs.queries.ts';
import { PARTIAL_SUFFIX } from '../layer/layer-writer.ts';
import type { NodeDb } from '../lineage/node-db.ts';
import { recover, type RecoveryAction, type RecoveryHooks } from '../lineage/recovery.ts';
import type { VmIdentity } from '../lineage/recovery.ts';
import type { VmRecord } from '../lineage/vms.queries.ts';
import { err, ok, systemCode, type FailureDetail, type Result } from '../result.ts';
import type { VmId } from '../units.ts';
import { letRun } from '../vmm/let-run.ts';
import { bindVm } from './attach.ts';
import { failureOf } from './failure.ts';
import type { CaptureObserver } from './observer.ts';
import type { RunDeps } from './run.ts';
import { LAYER_SUFFIX, preparedFolder, preparedRoot, stagingFolder } from './staging.ts';
import { processLives } from './tending.ts';
import type { TrackingMode } from './types.ts';
import { factsOf } from './vm-facts.ts';
import type { VmTable } from './vm-table.ts';

export interface RecoveryDeps {
  readonly config: Config;
  readonly nodeDb: NodeDb;
  readonly observer: CaptureObserver;
  readonly vms: VmTable;
  readonly supervisor: Supervision;
  readonly signal: AbortSignal;
  readonly publish: (job: CaptureJob) => void;
  /** Goes on with a VM in the background. */
  readonly tend: (vmId: VmId, known: { readonly runs: boolean }) => void;
}

type Tells = RunDeps['supervisor'];

/** What is known of the helper that resumes VMs when the daemon dies. */
export interface Supervision extends Tells {
  /** Whether the helper of the last life resumed this process. Absent: not known of any. */
  readonly wasResumed?: (vm: Pick<VmRecord, 'pid' | 'startTimeTicks'>) => boolean;
}

/** How long a VMM may take to say who it is at start-up, milliseconds. */
const rebindTimeoutMs = 5_000;

export async function recoverAtStart(deps: RecoveryDeps): Promise<void> {
  const { nodeDb, observer, config } = deps;
  await Promise.all(nodeDb.listVms().map((record) => rebind(record, deps)));
  // Whatever node.db could record of it: these get no second resume.
  const running = new Set<VmId>();
  const hooks: RecoveryHooks = {
    identity: (vm) => Promise.resolve(identityOf(vm, deps.vms)),
    wasResumed: (vm) => noteIf(running, vm, deps.supervisor.wasResumed?.(vm) ?? false),
    fileBytes,
    temporaryFiles: () => orphans(config, nodeDb),
    resume: async (vm, signal) => {
      const resumed = await resume(vm, deps.vms, signal);
      noteIf(running, vm, resumed.ok);
      return resumed;
    },
    removeFile,
    publish: deps.publish,
  };
  const report = await recover(nodeDb, hooks, deps.signal);
  for (const { kind } of report.done) {
    const what = recoveredBy[kind];
    if (what !== undefined) observer.recovered(what);
  }
  for (const { action, failure } of report.failed) {
    const facts = { action: action.kind, failure };
    if (action.kind === 'resume-vm') {
      observer.warn('a VM could not be resumed yet, and is tried again', facts);
    } else observer.warn('a recovery step failed and is tried again at the next start', facts);
  }
  for (const vm of nodeDb.listVms()) {
    const missing = deps.vms.handle(vm.vmId) === undefined && processLives(vm);
    if (missing || vm.pausedBy !== null) deps.tend(vm.vmId, { runs: running.has(vm.vmId) });
  }
}

function noteIf(noted: Set<VmId>, { vmId }: VmRecord, isSo: boolean): boolean {
  if (isSo) noted.add(vmId);
  return isSo;
}

/** What an action has put right; the publisher tells of its own, once they are done. */
const recoveredBy: Partial<Record<RecoveryAction['kind'], 'resumed' | 'aborted' | 'finished'>> = {
  'resume-vm': 'resumed',
  'abort-capture': 'aborted',
  'commit-capture': 'finished',
};

/** The same process under the same socket is taken up again; any other is left alone. */
export async function rebind(
  record: VmRecord,
  deps: Pick<RecoveryDeps, 'config' | 'observer' | 'vms' | 'signal'>,
): Promise<void> {
  const signal = AbortSignal.any([deps.signal, AbortSignal.timeout(rebindTimeoutMs)]);
  const { socketPath, vmId } = record;
  const trackingMode = record.trackingMode as TrackingMode;
  const { layout } = factsOf(record);
  const recalled = layout === null ? undefined : { ...record, layout };
  const request = { socketPath, vmId, trackingMode, recalled };
  const bound = await bindVm(deps.config, request, signal).catch((error: unknown) =>
    err(failureOf(error)),
  );
  if (!bound.ok) {
    deps.observer.warn('an attached VM was not found again', { vm: vmId, failure: bound.error });
    return;
  }
  const { identity } = bound.value;
  const same = identity.pid === record.pid && identity.startTimeTicks === record.startTimeTicks;
  if (same) deps.vms.put(bound.value);
  else bound.value[Symbol.dispose]();
}

function identityOf(vm: VmRecord, vms: VmTable): VmIdentity {
  const handle = vms.handle(vm.vmId);
  if (handle !== undefined) return handle.identity.check();
  return processLives(vm) ? 'same' : 'exited';
}

async function resume(
  vm: VmRecord,
  vms: VmTable,
  signal: AbortSignal,
): Promise<Result<void, FailureDetail>> {
  const handle = vms.handle(vm.vmId);
  if (handle === undefined) {
    const message = `the VMM of ${vm.vmId} does not answer`;
    return err({ kind: 'vmm-unreachable', message });
  }
  const resumed = await letRun(handle.client, signal);
  if (resumed.ok || resumed.error.kind === 'vm-exited') return ok(undefined);
  return resumed;
}

async function fileBytes(path: string): Promise<number | null> {
  try {
    return (await stat(path)).size;
  } catch (error) {
    if (systemCode(error) === 'ENOENT') return null;
    throw error;
  }
}

/**
 * What an earlier life made and no record names: it died just before the record of a file, or just
 * after the record that a file is no longer needed. Nobody makes any of it at start-up.
 */
async function orphans(config: Config, nodeDb: NodeDb): Promise<readonly string[]> {
  const { layers, staging } = config.paths;
  const unfinished = nodeDb.unfinishedJobs();
  const layerPaths = new Set([
    ...nodeDb.localLayers().map((layer) => layer.path),
    // A sealed layer becomes a known one when its capture is committed.
    ...unfinished.flatMap((job) => (job.layer === null ? [] : [job.layer.path])),
  ]);
  // What a capture short of its seal had staged goes with it, whether or not it had said so.
  const staged = new Set(
    unfinished
      .filter((job) => job.layer !== null)
      .map((job) => stagingFolder(config, job.captureId)),
  );
  const prepared = new Set(
    nodeDb
      .listVms()
      .flatMap(({ preparedId: id }) => (id === null ? [] : [preparedFolder(config, id)])),
  );
  return [
    ...(await pathsIn(layers)).filter((path) => isLayerFile(path) && !layerPaths.has(path)),
    ...(await pathsIn(staging)).filter((path) => !staged.has(path)),
    ...(await pathsIn(preparedRoot(config))).filter((path) => !prepared.has(path)),
  ];
}

/** Layers, whole or partial, and the temporary files that one was fetched into. */
const isLayerFile = (path: string): boolean =>
  path.endsWith(LAYER_SUFFIX) ||
  path.endsWith(PARTIAL_SUFFIX) ||
  /^\..*\.lsmt\./.test(basename(path));

async function pathsIn(folder: string): Promise<readonly string[]> {
  try {
    return (await readdir(folder)).map((name) => join(folder, name));
  } catch (error) {
    if (systemCode(error) === 'ENOENT') return [];
    throw error;
  }
}

async function removeFile(path: string): Promise<Result<void, FailureDetail>> {
  try {
    await rm(path, { recursive: true, force: true });
    return ok(undefined);
  } catch (error) {
    return err(failureOf(error));
  }
}
