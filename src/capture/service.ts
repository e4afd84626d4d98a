/**
 * The daemon's captures: who is attached, what runs, what is known of what ran. One per daemon;
 * jobs outlive their callers, and node.db outlives the daemon.
 */
import { randomUUID } from 'node:crypto';
import { mkdir } from 'node:fs/promises';
import type { ArtifactStore } from '../artifact/store.ts';
import type { Catalog } from '../catalog/catalog.ts';
import { isName, NAME_RULE } from '../catalog/check.ts';
import type { Clock } from '../clock.ts';
import type { Config } from '../config/schema.ts';
import type { CaptureJob, NewJob } from '../lineage/jobs.queries.ts';
import { Compactor } from '../lineage/compaction.ts';
import { keepTrimming } from '../lineage/job-trim.ts';
import { deleteUnneededLayers } from '../lineage/local-files.ts';
import { checkedMerge } from '../lineage/merge-run.ts';
import type { NodeDb } from '../lineage/node-db.ts';
import { ok, type FailureDetail } from '../result.ts';
import type { VmRecord } from '../lineage/vms.queries.ts';
import { captureId as toCaptureId } from '../units.ts';
import type { CaptureId, LayerUuid, NodeId, VmId } from '../units.ts';
import { bindVm } from './attach.ts';
import { precopyProblem } from './copy-ahead.ts';
import type { Engine } from './engine.ts';
import { failureOf } from './failure.ts';
import { forkVm, type ForkDeps } from './fork.ts';
import { hostFacts, hostVirtualization } from './host-facts.ts';
import { keptJson, viewOfJob } from './job-view.ts';
import type { ChainDeps } from './launch-chain.ts';
import type { CaptureObserver } from './observer.ts';
import { PreparedEntries, type NewEntry } from './prepared-entries.ts';
import { Publisher } from './publisher.ts';
import { rebind, recoverAtStart, type Supervision } from './recovery.ts';
import { refused, runningFacts, stoppingError, vmUnknown } from './refusals.ts';
import { CaptureRun } from './run.ts';
import { takeUp, takeUpFrom, type LaunchedFrom, type TakeUpDeps } from './take-up.ts';
import { processLives, Tending } from './tending.ts';
import { watchRun } from './watch.ts';
import type {
  AttachRequest,
  CaptureEvent,
  CaptureRequest,
  Captures,
  CaptureView,
  ForkRequest,
  ForkView,
  Outcome,
  ServiceError,
  VmView,
} from './types.ts';
import { factsOf, layoutJson } from './vm-facts.ts';
import type { VmHandle } from './vm-handle.ts';
import { VmTable } from './vm-table.ts';

export interface ServiceDeps {
  readonly config: Config;
  readonly clock: Clock;
  readonly nodeDb: NodeDb;
  readonly catalog: Catalog;
  readonly store: ArtifactStore;
  readonly engine: Engine;
  readonly observer: CaptureObserver;
  readonly supervisor: Supervision;
  readonly nodeId: NodeId;
}

/** How long a question to a VMM may take outside a capture, milliseconds. */
const attachTimeoutMs = 15_000;

/** Captures that a list shows, newest first. */
const listMax = 1_000;

/** Waits between tries to tell node.db how a capture ended, milliseconds. */
const recordWaitMsMin = 200;
const recordWaitMsMax = 10_000;

const freshVm: LaunchedFrom = { layers: [], hold: null, preparedId: null, byUs: false };

export class CaptureService implements Captures {
  readonly #deps: ServiceDeps;
  readonly #vms: VmTable;
  readonly #runs = new Map<CaptureId, CaptureRun>();
  readonly #byVm = new Map<VmId, CaptureRun>();
  readonly #publisher: Publisher;
  readonly #compactor: Compactor;
  readonly #tending: Tending;
  readonly #prepared: PreparedEntries;
  readonly #takeUps: TakeUpDeps & ChainDeps;
  readonly #forks: ForkDeps;
  readonly #stopping = new AbortController();
  readonly #background = new Set<Promise<unknown>>();

  private constructor(deps: ServiceDeps) {
    this.#deps = deps;
    this.#vms = new VmTable(deps.nodeDb);
    const { catalog, store, nodeDb, nodeId, observer } = deps;
    const virtualization = hostVirtualization();
    const host = hostFacts();
    const parts = { catalog, store, nodeDb, nodeId, observer };
    this.#publisher = new Publisher({ ...parts, host, virtualization });
    const { memorySnapshot, lineage, paths } = deps.config;
    const { compression, blockBytes } = memorySnapshot;
    this.#compactor = new Compactor({
      db: nodeDb,
      merge: checkedMerge({ compression, blockBytes }),
      layersFolder: paths.layers,
      maxChain: lineage.maxChain,
      clock: deps.clock,
      onCompacted: (report) => deps.observer.compacted(report),
      onFailed: (vm, failure) => deps.observer.warn('a compaction failed', { vm, failure }),
    });
    const { signal } = this.#stopping;
    this.#prepared = new PreparedEntries(deps);
    this.#takeUps = {
      ...deps,
      vms: this.#vms,
      runningOn: (vm) => this.#byVm.get(vm)?.captureId ?? null,
    };
    this.#forks = {
      ...this.#takeUps,
      clock: deps.clock,
      prepared: this.#prepared,
      startCapture: (...request) => this.#startCapture(...request),
      watch: (id) => this.watch(id, signal),
      getCapture: (id) => this.getCapture(id),
      decided: (id) => this.#decided(id),
      detach: (child) => this.detach(child),
      ended: () => this.#deleteUnneeded(),
      stopping: signal,
    };
    this.#tending = new Tending({
      ...deps,
      vms: this.#vms,
      signal,
      rebind: (record) => rebind(record, { ...deps, vms: this.#vms, signal }),
    });
  }

  #trimJobs(): Promise<void> {
    const { nodeDb, clock, config, observer } = this.#deps;
    const retentionMs = config.capture.jobRetention;
    const onFailed = (error: FailureDetail): void =>
      observer.warn('old captures could not be forgotten', { error });
    return keepTrimming({ db: nodeDb, clock, retentionMs, onFailed }, this.#stopping.signal);
  }

  /** Until the VM runs and is attached, or is gone. */
  #tend(vmId: VmId, known = { runs: false }): void {
    this.#track(this.#tending.tend(vmId, known));
  }

  /** Recovers what an earlier life of the daemon left, then takes requests. */
  static async start(deps: ServiceDeps): Promise<CaptureService> {
    const { paths } = deps.config;
    for (const folder of [paths.layers, paths.staging]) await mkdir(folder, { recursive: true });
    const service = new CaptureService(deps);
    await recoverAtStart({
      ...deps,
      vms: service.#vms,
      signal: service.#stopping.signal,
      publish: (job) => service.#publishLater(job),
      tend: (vmId, known) => service.#tend(vmId, known),
    });
    for (const vm of deps.nodeDb.listVms()) service.#compactor.check(vm.vmId);
    service.#track(service.#publisher.settleUntilDone(deps, service.#stopping.signal));
    service.#track(service.#trimJobs());
    return service;
  }

  async attach(request: AttachRequest): Promise<Outcome<VmView>> {
    const signal = AbortSignal.any([this.#stopping.signal, AbortSignal.timeout(attachTimeoutMs)]);
    try {
      const trackingMode = request.trackingMode ?? this.#deps.config.memorySnapshot.trackingMode;
      const bound = await bindVm(this.#deps.config, { ...request, trackingMode }, signal);
      if (!bound.ok) return refused(bound.error);
      const { launchParent } = request;
      if (launchParent === undefined) return takeUp(this.#takeUps, bound.value, freshVm);
      const launched = { byUs: false, preparedId: null };
      return await takeUpFrom(this.#takeUps, launchParent, bound.value, launched, signal);
    } catch (error) {
      return refused(failureOf(error));
    }
  }

  listVms(): readonly VmView[] {
    return this.#vms.list((id) => this.#byVm.get(id)?.captureId ?? null);
  }

  /** VMs that we have paused, that no capture holds, and that do not run yet: each is a page. */
  get stuckPaused(): number {
    return this.#tending.stuckPaused;
  }

  epochsOf(layers: readonly LayerUuid[]): ReadonlyMap<LayerUuid, number> {
    return this.#deps.nodeDb.epochsOf(layers);
  }

  getVm(id: VmId): VmView | undefined {
    return this.#vms.view(id, this.#byVm.get(id)?.captureId ?? null);
  }

  async detach(id: VmId): Promise<Outcome<null>> {
    const { nodeDb } = this.#deps;
    this.#recordEnds(id);
    const detached = nodeDb.detachVm(id);
    if (!detached.ok) return refused(detached.error, runningFacts(detached.error));
    this.#vms.drop(id);
    const { preparedId } = detached.value;
    if (preparedId !== null) await this.#prepared.settle(preparedId);
    await this.#deleteUnneeded();
    return ok(null);
  }

  startCapture(id: VmId, request: CaptureRequest): Promise<Outcome<CaptureView>> {
    return this.#startCapture(id, request, null);
  }

  /** With `entry`, it is a fork's: its capture is named like the entry. */
  async #startCapture(
    id: VmId,
    request: CaptureRequest,
    entry: NewEntry | null,
  ): Promise<Outcome<CaptureView>> {
    const { nodeDb, clock } = this.#deps;
    const { idempotencyKey, ...rest } = request;
    const job: NewJob = {
      captureId: toCaptureId(entry?.preparedId ?? randomUUID()),
      kind: entry === null ? 'capture' : 'fork',
      vmId: id,
      idempotencyKey: idempotencyKey ?? null,
      requestJson: JSON.stringify(rest),
      createdAtMs: clock.nowMs(),
    };
    // A key that was seen finds its capture, whatever became of the VM and the alias since.
    if (idempotencyKey !== undefined && nodeDb.hasJobOf(idempotencyKey)) return this.#repeated(job);
    const taken = await this.#aliasProblem(request);
    if (this.#stopping.signal.aborted) return refused(stoppingError());
    const record = nodeDb.getVm(id);
    if (record === undefined) return refused(vmUnknown(id));
    if (taken !== null) return refused(taken);
    const handle = this.#vms.handle(id);
    if (handle === undefined) return refused(notFoundAgain(record));
    const precopy = precopyProblem(request, handle.source);
    if (precopy !== null) return refused(precopy);
    this.#recordEnds(id);
    const created = nodeDb.createJob(job);
    if (!created.ok) return refused(created.error, runningFacts(created.error));
    if (!created.value.created) return this.#repeated(job);
    return ok(this.#startRun(handle, job.captureId, request, entry).view());
  }

  /** The capture that has this key, where the request is the same. */
  #repeated(job: NewJob): Outcome<CaptureView> {
    const known = this.#deps.nodeDb.createJob(job);
    if (!known.ok) return refused(known.error, runningFacts(known.error));
    const { captureId } = known.value.job;
    return ok(this.getCapture(captureId) ?? viewOfJob(known.value.job));
  }

  #startRun(
    handle: VmHandle,
    captureId: CaptureId,
    request: CaptureRequest,
    entry: NewEntry | null,
  ): CaptureRun {
    const { engine, config, clock, nodeDb, observer, supervisor } = this.#deps;
    const run = new CaptureRun(handle, captureId, request, {
      engine,
      config,
      clock,
      nodeDb,
      observer,
      supervisor,
      entry,
      compactor: this.#compactor,
      publishOnce: (capture, plan, _layer, signal) =>
        this.#publisher.publishOnce(capture, plan, signal),
      stopping: this.#stopping.signal,
    });
    this.#runs.set(captureId, run);
    this.#byVm.set(handle.vmId, run);
    this.#track(run.ended.then(() => this.#runEnded(run)));
    return run;
  }

  async #runEnded(run: CaptureRun): Promise<void> {
    const { nodeDb, observer } = this.#deps;
    const { vmId } = run.vm;
    if (this.#byVm.get(vmId) === run) this.#byVm.delete(vmId);
    // A VM that could not be resumed does not wait for node.db.
    if (run.isStuck) this.#tend(vmId);
    await this.#recordEnd(run);
    this.#runs.delete(run.captureId);
    this.#keepLayout(run.vm);
    const kept = nodeDb.setResult(run.captureId, keptJson(run.view()));
    if (!kept.ok) observer.warn('a result could not be kept', { error: kept.error });
    await this.#deleteUnneeded();
    await this.#verifyIfDue(run);
  }

  /** `capture.verify.every`: one capture more, of its own; the next one asks again where it can't run. */
  async #verifyIfDue(run: CaptureRun): Promise<void> {
    const { config, nodeDb, observer } = this.#deps;
    const { every } = config.capture.verify;
    const { vmId } = run.vm;
    const { status } = run.view();
    const counts = status === 'committed' || status === 'published';
    if (every === 0 || !counts || this.#stopping.signal.aborted || run.vm.gone) return;
    if (this.#byVm.has(vmId) || nodeDb.countUnverified(vmId, every * 2) < every) return;
    const request: CaptureRequest = { verify: true, transient: true, resumeAfter: 'copy' };
    const started = await this.#startCapture(vmId, request, null);
    if (started.ok || started.error.kind === 'capture-running') return;
    observer.warn('a VM could not be verified', { vm: vmId, error: started.error });
  }

  /** As soon as node.db can be written again; recovery does it where the daemon stops before that. */
  async #recordEnd(run: CaptureRun): Promise<void> {
    const { signal } = this.#stopping;
    for (let waitMs = recordWaitMsMin; !run.recordEnd().ok && !signal.aborted;) {
      await this.#deps.clock.sleep(waitMs, signal).catch(() => undefined);
      waitMs = Math.min(waitMs * 2, recordWaitMsMax);
    }
  }

  /** Whoever asks for the VM now need not wait for that. */
  #recordEnds(vmId: VmId): void {
    for (const run of this.#runs.values()) {
      if (run.vm.vmId === vmId && run.progress.hasEnded) run.recordEnd();
    }
  }

  /** The next life of the daemon need not find the memory of a process again, which may be harder. */
  #keepLayout({ vmId, identity, source }: VmHandle): void {
    const { nodeDb, observer } = this.#deps;
    const record = nodeDb.getVm(vmId);
    if (source.known === null || record?.pid !== identity.pid) return;
    if (record.startTimeTicks !== identity.startTimeTicks) return;
    const json = layoutJson(source.known);
    const before = factsOf(record).layout;
    if (before !== null && layoutJson(before) === json) return;
    const kept = nodeDb.setVmFact(vmId, 'layout', json);
    if (!kept.ok) observer.warn('where a VM has its memory was not kept', { error: kept.error });
  }

  /** After whatever ended a need: a lease that was the last on a chain that was compacted, a VM. */
  async #deleteUnneeded(): Promise<void> {
    const { nodeDb, observer } = this.#deps;
    const deleted = await deleteUnneededLayers(nodeDb);
    if (deleted.ok && deleted.value.failed.length === 0) return;
    const facts = deleted.ok ? { failed: deleted.value.failed } : { error: deleted.error };
    observer.warn('unneeded layers could not be deleted', facts);
  }

  getCapture(id: CaptureId): CaptureView | undefined {
    const run = this.#runs.get(id);
    if (run !== undefined) return run.view();
    const job = this.#deps.nodeDb.getJob(id);
    return job === undefined ? undefined : viewOfJob(job);
  }

  listCaptures(vm?: VmId): readonly CaptureView[] {
    const jobs = this.#deps.nodeDb.listJobs({
      limit: listMax,
      ...(vm === undefined ? {} : { vmId: vm }),
    });
    return jobs.map((job) => this.#runs.get(job.captureId)?.view() ?? viewOfJob(job));
  }

  async #decided(id: CaptureId): Promise<void> {
    const run = this.#runs.get(id);
    if (run?.view().status === 'running') await run.ended;
  }

  async cancelCapture(id: CaptureId): Promise<Outcome<CaptureView>> {
    const run = this.#runs.get(id);
    const known = this.getCapture(id);
    if (known === undefined) {
      return refused({ kind: 'capture-unknown', message: `no capture ${id}` });
    }
    if (run === undefined || !run.cancel()) {
      const message = `capture ${id} is ${known.status}: it is too late to cancel it`;
      return refused({ kind: 'capture-not-cancellable', message });
    }
    await run.ended;
    return ok(run.view());
  }

  watch(id: CaptureId, signal: AbortSignal): AsyncIterable<CaptureEvent> {
    return watchRun(this.#runs.get(id), () => this.getCapture(id), signal);
  }

  async waitFor(id: CaptureId, signal: AbortSignal): Promise<CaptureView> {
    for await (const event of this.watch(id, signal)) void event;
    const view = this.getCapture(id);
    if (view === undefined) throw new Error(`no capture ${id}`);
    return view;
  }

  fork(id: VmId, request: ForkRequest): Promise<Outcome<ForkView>> {
    const made = forkVm(this.#forks, id, request);
    this.#track(made);
    return made;
  }

  async close(): Promise<void> {
    for (const run of this.#runs.values()) {
      run.abort({ kind: 'daemon-stopping', message: 'the daemon is stopping' });
    }
    this.#stopping.abort(new Error('the daemon is stopping'));
    await this.#compactor.close();
    await Promise.all(this.#background);
    this.#vms.closeAll();
  }

  #track(work: Promise<unknown>): void {
    const settled = work
      .catch((error: unknown) => {
        this.#deps.observer.warn('background work failed with a bug', { error });
      })
      .finally(() => this.#background.delete(settled));
    this.#background.add(settled);
  }

  #publishLater(job: CaptureJob): void {
    const { signal } = this.#stopping;
    const published = this.#publisher.publishUntilDone(job, this.#deps, signal);
    this.#track(published.then(() => this.#deleteUnneeded()));
  }

  /** An alias names one snapshot for good: a taken one is refused before anything is paused. */
  async #aliasProblem(request: CaptureRequest): Promise<ServiceError | null> {
    if (request.alias === undefined) return null;
    if (!isName(request.alias)) {
      return { kind: 'request-invalid', message: `alias: must be ${NAME_RULE}` };
    }
    const known = await this.#deps.catalog.show(request.alias);
    if (known.ok) {
      const message = `alias ${request.alias} names snapshot ${known.value.id} already`;
      return { kind: 'alias-taken', message };
    }
    return known.error.kind === 'request-invalid' ? known.error : null;
  }
}

/** The VM is on record, but its process was not taken up again since the daemon started. */
function notFoundAgain(record: VmRecord): ServiceError {
  const { vmId, pid, socketPath } = record;
  if (!processLives(record)) {
    return { kind: 'vm-exited', message: `the VMM of ${vmId} exited (pid ${pid})` };
  }
  const message =
    `the VMM of ${vmId} (${socketPath}, pid ${pid}) has not answered since the daemon started; ` +
    'it is tried again';
  return { kind: 'vmm-unreachable', message };
}
