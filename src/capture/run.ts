/**
 * One run of the pipeline on one VM, from the durable intent to the published snapshot.
 *
 * R1: everything that can be refused or allocated is refused or allocated before the pause.
 * R2: one resume per pause, on every outcome (the rules of `Freeze`).
 * R3: before the commit point any failure aborts: no layer file, no row, and the ledger keeps the
 *     set. After it nothing aborts: publish is tried until it succeeds or the daemon stops.
 * R4: the first failure is the one reported; what follows from it is not.
 */
import type { Clock } from '../clock.ts';
import type { Config } from '../config/schema.ts';
import { crashPoint } from '../crash-points.ts';
import type { Compactor } from '../lineage/compaction.ts';
import type { EpochIntent, FetchedPages } from '../lineage/epochs.ts';
import type { NodeDb } from '../lineage/node-db.ts';
import type { SealedLayer } from '../layer/layer-writer.ts';
import { Freeze, failedWith } from '../pipeline/freeze.ts';
import { Cleanups } from '../pipeline/cleanups.ts';
import { StageMeter, stopwatch } from '../pipeline/meter.ts';
import { Failure, ok, type FailureDetail, type Result } from '../result.ts';
import type { Published, PublishFailure } from '../stages/publish.ts';
import { stageNames, type StageName } from '../stage-names.ts';
import type { CaptureId } from '../units.ts';
import { isGone, letRun } from '../vmm/let-run.ts';
import type { FetchedSet } from '../vmm/source.ts';
import type { Engine, Seat } from './engine.ts';
import type { CaptureObserver } from './observer.ts';
import { Counts, composeStages } from './compose.ts';
import { prepare, type Prepared } from './preparation.ts';
import { failureOf, orThrow } from './failure.ts';
import type { KeptResult } from './job-view.ts';
import { LazyFile, removeLeftovers, stagingFolder } from './staging.ts';
import type { NewEntry } from './prepared-entries.ts';
import type { PublishPlan } from './publish-plan.ts';
import { CaptureProgress } from './progress.ts';
import type { CaptureRequest, CaptureView, ResumeAfter } from './types.ts';
import { lostPages, Verification, type VerifyReport } from './verify.ts';
import type { VmHandle } from './vm-handle.ts';

export interface RunDeps {
  readonly engine: Engine;
  readonly config: Config;
  readonly clock: Clock;
  readonly nodeDb: NodeDb;
  readonly observer: CaptureObserver;
  /** Told before the pause and after the resume; resumes the VM should this process die between. */
  readonly supervisor: {
    readonly paused: (vm: VmHandle) => void;
    readonly resumed: (vm: VmHandle) => void;
  };
  /** What the children of a fork are started from; null where this is no fork's capture. */
  readonly entry: NewEntry | null;
  /** Keeps chains short; captures wait for it where they must, before their pause. */
  readonly compactor: Pick<Compactor, 'admit' | 'check' | 'captureEnded'>;
  readonly publishOnce: (
    captureId: CaptureId,
    plan: PublishPlan,
    layer: SealedLayer,
    signal: AbortSignal,
  ) => Promise<Result<Published, PublishFailure>>;
  /** Aborted when the daemon stops: ends waits for a publish; recovery goes on with it. */
  readonly stopping: AbortSignal;
}

const pagesOf = (fetched: FetchedSet, intent: EpochIntent): FetchedPages => ({
  selected: fetched.selected,
  zero: fetched.zero,
  widened: intent.widen !== null,
});

export class CaptureRun {
  readonly vm: VmHandle;
  readonly captureId: CaptureId;
  /** Resolves when the capture is published, aborted, or left to recovery. Never rejects. */
  readonly ended: Promise<void>;
  readonly progress: CaptureProgress;
  readonly #deps: RunDeps;
  readonly #request: CaptureRequest;
  readonly #abort = new AbortController();
  readonly #freeze: Freeze;
  readonly #meters: ReadonlyMap<StageName, StageMeter>;
  readonly #now: () => number;
  #seat: Seat | undefined;
  #committed = false;
  #fetchAttempted = false;
  /** Why it aborted, until node.db knows. */
  #aborted: FailureDetail | null = null;
  #vmStatePath: string | null = null;
  #unsealedPath: string | undefined;
  /** What `recordLater` left to do; null once it is under way. */
  #record: (() => Promise<void>) | null = null;
  #recorded: Promise<void> = Promise.resolve();

  constructor(vm: VmHandle, captureId: CaptureId, request: CaptureRequest, deps: RunDeps) {
    this.vm = vm;
    this.captureId = captureId;
    this.#request = request;
    this.#deps = deps;
    this.#now = stopwatch(deps.clock);
    this.#freeze = this.#makeFreeze();
    this.#meters = new Map(
      stageNames.map((stage) => [
        stage,
        new StageMeter(stage, this.#now, (name, state) => this.progress.stage(name, state)),
      ]),
    );
    const measure = {
      now: this.#now,
      wallMs: () => deps.clock.nowMs(),
      stages: () => [...this.#meters.values()].map((meter) => meter.measure()),
      frozen: () => this.#freeze.span,
    };
    this.progress = new CaptureProgress({ captureId, vmId: vm.vmId }, measure, deps.observer);
    this.ended = this.#run();
  }

  view(): CaptureView {
    return this.progress.view();
  }

  /** False when it is too late: the epoch is committed. */
  cancel(): boolean {
    if (this.#committed || this.progress.hasEnded) return false;
    this.abort({ kind: 'cancelled', message: `capture ${this.captureId} was cancelled` });
    return true;
  }

  /** Ends an uncommitted capture with this failure; the VM runs at once. */
  abort(detail: FailureDetail, cause?: unknown): void {
    if (this.#committed || this.#abort.signal.aborted) return;
    const failure = new Failure(detail, cause);
    this.#abort.abort(failure);
    this.#seat?.abort(failure);
    void this.#freeze.end();
  }

  get resumeAfter(): ResumeAfter {
    return this.#request.resumeAfter ?? this.#deps.config.capture.resumeAfter;
  }

  async #run(): Promise<void> {
    const watches = new AbortController();
    try {
      this.progress.started();
      this.#watch(watches.signal);
      this.progress.published(await this.#capture());
    } catch (error) {
      await this.#failed(error);
    } finally {
      await this.#freeze.end();
      const { state, failure } = this.#freeze;
      if (state !== 'stuck' && failure !== undefined) this.#warn('after a resume', failure);
      watches.abort();
      this.progress.ended(this.#freeze);
    }
  }

  async #capture(): Promise<Published> {
    const { engine, config, nodeDb } = this.#deps;
    const { signal } = this.#abort;
    await using resources = new Cleanups();
    this.#seat = engine.seat();
    const seat = this.#seat;
    resources.defer(() => seat.leave());
    const prepared = await prepare({
      vm: this.vm,
      captureId: this.captureId,
      request: this.#request,
      deps: this.#deps,
      signal,
      cleanups: resources,
    });
    const memoryFile = new LazyFile();
    resources.defer(() => memoryFile.close());
    resources.use(await engine.enter('pause', signal));
    const counts = new Counts();
    const verification = this.#verification(prepared);
    const recordSet = async (fetched: FetchedSet): Promise<void> => {
      const pages = pagesOf(fetched, prepared.intent);
      orThrow(await nodeDb.recordSetAsync(this.captureId, pages));
      crashPoint('ledger-durable');
    };
    const outcomes = composeStages({
      config,
      prepared,
      seat,
      counts,
      verification,
      freeze: this.#freeze,
      meters: this.#meters,
      signal,
      stopping: this.#deps.stopping,
      engine,
      clock: this.#deps.clock,
      observer: this.#deps.observer,
      resumeAfter: this.resumeAfter,
      vm: this.vm,
      captureId: this.captureId,
      request: this.#request,
      entry: this.#deps.entry,
      memoryFile,
      vmStatePath: () => this.#vmStatePath,
      tookState: (path) => (this.#vmStatePath = path),
      fetching: () => (this.#fetchAttempted = true),
      sealing: (path) => (this.#unsealedPath = path),
      commitEpoch: (sealed, plan) => {
        counts.verify = this.#verified(verification);
        this.#commitEpoch(sealed, plan, prepared.intent, counts);
      },
      copied: () => this.#resumeAt('copy'),
      committed: () => this.#resumeAt('commit'),
      publishOnce: (plan, layer, stop) => this.#deps.publishOnce(this.captureId, plan, layer, stop),
      publishFailed: (failure) => this.progress.publishFailed(failure),
      joinSet: (fetched) => {
        this.#vmStatePath = fetched.vmStatePath;
        crashPoint('set-fetched');
        return orThrow(nodeDb.joinSet(this.captureId, pagesOf(fetched, prepared.intent)));
      },
      recordSet,
      recordRound: async (sets) =>
        orThrow(await nodeDb.recordSetAsync(this.captureId, { ...sets, widened: false })),
      recordLater: (fetched) => (this.#record = () => recordSet(fetched)),
      recorded: () => this.#recordOnce(),
    });
    for await (const published of outcomes) return published;
    throw new Error('the pipeline ended without a snapshot');
  }

  #verification({ parentStack: stack, parentPages }: Prepared): Verification | null {
    const { identity } = this.vm;
    return this.#request.verify === true
      ? new Verification({ identity, stack, parentPages })
      : null;
  }

  /** What was lost is on record before anything is committed on top of it. */
  #verified(verification: Verification | null): VerifyReport | null {
    if (verification === null) return null;
    const report = verification.report();
    const { nodeDb, observer } = this.#deps;
    const lost = lostPages(report);
    if (lost > 0) {
      const reason = `capture ${this.captureId} found ${lost} pages that its layers had lost`;
      orThrow(nodeDb.pagesLost(this.vm.vmId, reason));
    }
    observer.verified({ captureId: this.captureId, vmId: this.vm.vmId }, report);
    return report;
  }

  #commitEpoch(sealed: SealedLayer, plan: PublishPlan, intent: EpochIntent, counts: Counts): void {
    const { nodeDb } = this.#deps;
    const result = this.progress.resultOf({
      sealed,
      plan,
      intent,
      counts,
      source: this.vm.source,
      resumeAfter: this.resumeAfter,
      advance: this.#deps.config.lineage.advance,
    });
    crashPoint('layer-sealed');
    const kept: KeptResult = { result, stages: [], vmRunning: null };
    const facts = { publishJson: JSON.stringify(plan), resultJson: JSON.stringify(kept) };
    const complete = counts.verify?.compared === 'all';
    orThrow(nodeDb.sealed(this.captureId, { ...sealed, complete }, facts));
    crashPoint('seal-recorded');
    orThrow(nodeDb.commit(this.captureId, this.#deps.entry));
    this.#committed = true;
    crashPoint('epoch-committed');
    this.vm.settleEpoch('commit', (error) =>
      this.#warn('a VMM epoch could not be committed', error),
    );
    this.#unsealedPath = undefined;
    this.progress.committed(result);
    // Compaction works outside the pause; where this capture still has one, `done` starts it.
    if (this.#freeze.state !== 'paused') this.#deps.compactor.check(this.vm.vmId);
  }

  #recordOnce(): Promise<void> {
    if (this.#record !== null) {
      this.#recorded = this.#record();
      this.#record = null;
      this.#recorded.catch((error: unknown) => this.abort(failureOf(error), error));
    }
    return this.#recorded;
  }

  #resumeAt(step: ResumeAfter): Promise<void> {
    const order: readonly ResumeAfter[] = ['copy', 'commit', 'publish'];
    const isDue = order.indexOf(this.resumeAfter) <= order.indexOf(step);
    return isDue ? this.#freeze.end() : Promise.resolve();
  }

  /** R3, R4. */
  async #failed(error: unknown): Promise<void> {
    const { observer } = this.#deps;
    const reason: unknown = this.#abort.signal.aborted ? this.#abort.signal.reason : error;
    const detail = failureOf(reason);
    if (!(reason instanceof Failure)) {
      observer.warn('a capture failed with a bug', { captureId: this.captureId, error: reason });
    }
    await this.#freeze.end();
    // An abort must not come first: what was fetched stays in the ledger.
    await this.#recordOnce().catch(() => undefined);
    if (this.#committed) {
      this.progress.leftCommitted(detail);
      return;
    }
    if (this.#fetchAttempted) {
      this.vm.settleEpoch('abort', (error) =>
        this.#warn('a VMM epoch could not be aborted', error),
      );
    }
    const staged = stagingFolder(this.#deps.config, this.captureId);
    const layer = this.#unsealedPath === undefined ? [] : [this.#unsealedPath];
    await removeLeftovers([...layer, staged], observer);
    this.#aborted = detail;
    const recorded = this.recordEnd();
    this.#deps.compactor.captureEnded(this.vm.vmId);
    if (!recorded.ok) {
      this.#warn('an end could not be recorded yet, and is tried again', recorded.error);
    }
    this.progress.aborted(detail);
  }

  /** After the end: the VM is still paused, for all that is known. */
  get isStuck(): boolean {
    return this.#freeze.state === 'stuck';
  }

  /** After the end: tells node.db of an abort and of a resume, where it has not been told yet. */
  recordEnd(): Result<void, FailureDetail> {
    const { nodeDb } = this.#deps;
    const { vmId } = this.vm;
    if (this.#aborted !== null) {
      const options = { fetchAttempted: this.#fetchAttempted };
      const recorded = nodeDb.abort(this.captureId, this.#aborted, options);
      if (!recorded.ok) return recorded;
      this.#aborted = null;
    }
    const runs = this.#freeze.state === 'resumed' || this.#freeze.state === 'refused';
    if (!runs || nodeDb.getVm(vmId)?.pausedBy !== this.captureId) return ok(undefined);
    return nodeDb.clearPaused(vmId, this.captureId);
  }

  #warn(what: string, error: unknown): void {
    this.#deps.observer.warn(what, { captureId: this.captureId, error });
  }

  #watch(until: AbortSignal): void {
    const { clock, config } = this.#deps;
    const ignore = (): void => undefined;
    void this.vm.identity.onExit(until).then(() => {
      this.abort({ kind: 'vm-exited', message: `the VMM of ${this.vm.vmId} exited` });
    }, ignore);
    void clock.sleep(config.capture.timeout, until).then(() => {
      const message = `not committed after ${config.capture.timeout} ms (capture.timeout)`;
      this.abort({ kind: 'capture-timeout', message });
    }, ignore);
  }

  #makeFreeze(): Freeze {
    const { nodeDb, clock, supervisor, observer, config } = this.#deps;
    const { vm, captureId } = this;
    const deadlineMs = this.#request.pauseDeadlineMs ?? config.capture.pauseDeadline;
    const thawed = new AbortController();
    // Not this capture's own signal: an aborted capture still waits for these answers.
    const patient = new AbortController().signal;
    const freeze = new Freeze(
      {
        intend: () => {
          orThrow(nodeDb.markPaused(vm.vmId, captureId));
          crashPoint('pause-intended');
          supervisor.paused(vm);
          void clock.sleep(deadlineMs, thawed.signal).then(
            () => this.#pausedTooLong(deadlineMs),
            () => undefined,
          );
        },
        pause: async () => {
          orThrow(await vm.client.pause(patient));
          crashPoint('vm-paused');
        },
        wasAnswered: (error) => failedWith(error, 'vmm-refused'),
        isPaused: () => vm.isPaused(patient),
        resume: async () => {
          thawed.abort(new Error('resumed'));
          crashPoint('before-resume');
          orThrow(await letRun(vm.client, patient));
          crashPoint('vm-resumed');
        },
        surelyGone: (error) => error instanceof Failure && isGone(error.detail as FailureDetail),
        done: () => {
          thawed.abort(new Error('resumed'));
          supervisor.resumed(vm);
          if (this.#committed) this.#deps.compactor.check(vm.vmId);
          const cleared = nodeDb.clearPaused(vm.vmId, captureId);
          if (!cleared.ok)
            observer.warn('a resume could not be recorded', { error: cleared.error });
        },
      },
      clock,
      this.#now,
    );
    return freeze;
  }

  #pausedTooLong(deadlineMs: number): void {
    const message = `the VM was frozen for longer than ${deadlineMs} ms (capture.pause_deadline)`;
    this.abort({ kind: 'pause-deadline', message });
    void this.#freeze.end();
  }
}
