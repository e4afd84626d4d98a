/**
 * What a daemon does first: node.db says how far everything got, the plan is a pure function of that
 * and of what is true outside (`RecoveryFacts`), and the executor carries it out in this order:
 *
 * 1. every VM that we paused runs again (only if it is still the same process: a socket path that
 *    another VMM took over is left alone; and only if the supervisor has not resumed it already: by now
 *    its owner may want it paused);
 * 2. captures short of `sealed` abort, files first, then the record, which waits for no file that cannot
 *    be removed: it is an orphan at the next start; a `sealed` one whose file is whole is committed,
 *    since every check of its copy had passed;
 * 3. committed captures are handed over for publishing;
 * 4. compactions short of their swap are given up, files first; they are planned anew;
 * 5. temporary files that nobody owns go, then layers that nothing needs.
 *
 * Each action may be repeated: a crash during recovery is followed by the same plan again.
 */
import type { FailureDetail, Result } from '../result.ts';
import { assert, unreachable } from '../result.ts';
import type { CaptureId, VmId } from '../units.ts';
import type { PendingCompaction } from './compactions.queries.ts';
import type { CaptureJob } from './jobs.queries.ts';
import { deleteUnneededLayers } from './local-files.ts';
import type { NodeDb } from './node-db.ts';
import type { VmRecord } from './vms.queries.ts';

export type VmIdentity = 'same' | 'exited' | 'replaced';

export interface RecoveryState {
  readonly vms: readonly VmRecord[];
  readonly unfinished: readonly CaptureJob[];
  readonly compactions: readonly PendingCompaction[];
}

export interface RecoveryFacts {
  /** Whether each attached VM is still the process that was attached. */
  readonly identity: ReadonlyMap<VmId, VmIdentity>;
  /** Those that the supervisor resumed after the last life had ended. */
  readonly resumed: ReadonlySet<VmId>;
  /** Size of each sealed layer's file; absent where there is none. */
  readonly fileBytes: ReadonlyMap<string, number>;
  /** Temporary files found in our folders: at start-up nobody writes any. */
  readonly temporaryFiles: readonly string[];
}

export type RecoveryAction =
  | { readonly kind: 'resume-vm'; readonly vm: VmRecord; readonly captureId: CaptureId }
  /** What we paused is gone, is another process, or was resumed already: only the record changes. */
  | { readonly kind: 'forget-pause'; readonly vm: VmRecord; readonly captureId: CaptureId }
  | {
      readonly kind: 'abort-capture';
      readonly captureId: CaptureId;
      readonly removeFiles: readonly string[];
      readonly failure: FailureDetail;
    }
  | { readonly kind: 'end-needs' }
  | { readonly kind: 'commit-capture'; readonly captureId: CaptureId }
  | { readonly kind: 'publish-capture'; readonly captureId: CaptureId }
  | {
      readonly kind: 'abandon-compaction';
      readonly compactionId: string;
      readonly removeFiles: readonly string[];
    }
  | { readonly kind: 'remove-file'; readonly path: string }
  | { readonly kind: 'delete-layers' };

export function planRecovery(state: RecoveryState, facts: RecoveryFacts): RecoveryAction[] {
  const actions: RecoveryAction[] = [];
  for (const vm of state.vms) {
    if (vm.pausedBy === null) continue;
    const isPaused = facts.identity.get(vm.vmId) === 'same' && !facts.resumed.has(vm.vmId);
    actions.push({ kind: isPaused ? 'resume-vm' : 'forget-pause', vm, captureId: vm.pausedBy });
  }
  // Before a publish, which takes a hold that still has an owner.
  actions.push({ kind: 'end-needs' });
  const publishes: RecoveryAction[] = [];
  for (const job of state.unfinished) {
    const { captureId } = job;
    if (job.step !== 'committed' && !isWhole(job, facts)) {
      actions.push(abortAction(job));
      continue;
    }
    if (job.step === 'sealed') actions.push({ kind: 'commit-capture', captureId });
    publishes.push({ kind: 'publish-capture', captureId });
  }
  actions.push(...publishes);
  for (const { compactionId, scratchPaths } of state.compactions) {
    actions.push({ kind: 'abandon-compaction', compactionId, removeFiles: scratchPaths });
  }
  for (const path of facts.temporaryFiles) actions.push({ kind: 'remove-file', path });
  actions.push({ kind: 'delete-layers' });
  return actions;
}

function isWhole(job: CaptureJob, facts: RecoveryFacts): boolean {
  if (job.step !== 'sealed') return false;
  assert(job.layer !== null, 'a sealed capture has a layer');
  return facts.fileBytes.get(job.layer.path) === job.layer.sizeBytes;
}

function abortAction(job: CaptureJob): RecoveryAction {
  const files = new Set(job.scratchPaths);
  if (job.layer !== null) files.add(job.layer.path);
  return {
    kind: 'abort-capture',
    captureId: job.captureId,
    removeFiles: [...files],
    failure: {
      kind: 'daemon-restarted',
      message: `the daemon ended while capture ${job.captureId} was ${job.step}`,
    },
  };
}

/** What recovery needs from above; none of these may throw for an expected failure. */
export interface RecoveryHooks {
  identity(vm: VmRecord): Promise<VmIdentity>;
  /** Whether the supervisor resumed this process after the last life had ended. */
  wasResumed(vm: VmRecord): boolean;
  /** Size in bytes; null where there is no such file. */
  fileBytes(path: string): Promise<number | null>;
  temporaryFiles(): Promise<readonly string[]>;
  /** Resolves once the VM runs, or has turned out to be gone. */
  resume(vm: VmRecord, signal: AbortSignal): Promise<Result<void, FailureDetail>>;
  /** A missing file counts as removed. */
  removeFile(path: string): Promise<Result<void, FailureDetail>>;
  /** Only starts it: publishing is retried until it succeeds, in the background. */
  publish(job: CaptureJob): void;
}

export interface RecoveryReport {
  readonly done: readonly RecoveryAction[];
  /** To be tried again: a VM whose resume failed keeps its mark, a capture its step. */
  readonly failed: readonly { readonly action: RecoveryAction; readonly failure: FailureDetail }[];
}

export async function recover(
  db: NodeDb,
  hooks: RecoveryHooks,
  signal: AbortSignal,
): Promise<RecoveryReport> {
  const state = {
    vms: db.listVms(),
    unfinished: db.unfinishedJobs(),
    compactions: db.pendingCompactions(),
  };
  const plan = planRecovery(state, await gatherFacts(state, hooks));
  const done: RecoveryAction[] = [];
  const failed: { action: RecoveryAction; failure: FailureDetail }[] = [];
  for (const action of plan) {
    const removeFiles = 'removeFiles' in action ? action.removeFiles : [];
    for (const path of removeFiles) {
      const removed = await hooks.removeFile(path);
      const failure = removed.ok ? undefined : removed.error;
      if (failure !== undefined) failed.push({ action: { kind: 'remove-file', path }, failure });
    }
    const outcome = await perform(db, hooks, action, signal);
    if (outcome.ok) done.push(action);
    else failed.push({ action, failure: outcome.error });
  }
  return { done, failed };
}

async function gatherFacts(state: RecoveryState, hooks: RecoveryHooks): Promise<RecoveryFacts> {
  const identity = new Map<VmId, VmIdentity>();
  for (const vm of state.vms) identity.set(vm.vmId, await hooks.identity(vm));
  const fileBytes = new Map<string, number>();
  for (const job of state.unfinished) {
    if (job.layer === null) continue;
    const size = await hooks.fileBytes(job.layer.path);
    if (size !== null) fileBytes.set(job.layer.path, size);
  }
  const resumed = new Set(state.vms.filter((vm) => hooks.wasResumed(vm)).map((vm) => vm.vmId));
  return { identity, resumed, fileBytes, temporaryFiles: await hooks.temporaryFiles() };
}

/** Once the files of the action are gone, or have turned out to stay. */
async function perform(
  db: NodeDb,
  hooks: RecoveryHooks,
  action: RecoveryAction,
  signal: AbortSignal,
): Promise<Result<unknown, FailureDetail>> {
  switch (action.kind) {
    case 'resume-vm': {
      const resumed = await hooks.resume(action.vm, signal);
      return resumed.ok ? db.clearPaused(action.vm.vmId, action.captureId) : resumed;
    }
    case 'forget-pause':
      return db.clearPaused(action.vm.vmId, action.captureId);
    case 'end-needs':
      return db.endEarlierNeeds();
    case 'abort-capture':
      return db.abort(action.captureId, action.failure);
    case 'abandon-compaction':
      return db.abandonCompaction(action.compactionId);
    case 'commit-capture':
      return db.commit(action.captureId);
    case 'publish-capture': {
      const job = db.getJob(action.captureId);
      if (job?.step === 'committed') hooks.publish(job);
      return { ok: true, value: undefined };
    }
    case 'remove-file':
      return hooks.removeFile(action.path);
    case 'delete-layers':
      return deleteUnneededLayers(db);
    default:
      return unreachable(action);
  }
}
