/**
 * What is known of a running capture, for those who look: its view, its events, and what observers
 * are told.
 */
import type { EpochIntent } from '../lineage/epochs.ts';
import type { SealedLayer } from '../layer/layer-writer.ts';
import type { Freeze } from '../pipeline/freeze.ts';
import { overlapMs, type Span, type StageMeasure } from '../pipeline/meter.ts';
import type { FailureDetail } from '../result.ts';
import type { StageName } from '../stage-names.ts';
import type { Published, PublishFailure } from '../stages/publish.ts';
import type { CaptureId, VmId } from '../units.ts';
import type { DirtySource } from '../vmm/source.ts';
import type { Counts } from './compose.ts';
import type { CaptureObserver } from './observer.ts';
import type { PublishPlan } from './publish-plan.ts';
import type {
  CaptureEvent,
  CaptureResult,
  CaptureStatus,
  CaptureView,
  ResumeAfter,
  StageReport,
} from './types.ts';

export interface Measure {
  readonly now: () => number;
  readonly wallMs: () => number;
  readonly stages: () => readonly (StageMeasure | undefined)[];
  readonly frozen: () => Span | undefined;
}

export type Listener = (event: CaptureEvent) => void;

export class CaptureProgress {
  readonly captureId: CaptureId;
  readonly vmId: VmId;
  readonly #createdAtMs: number;
  readonly #observer: CaptureObserver;
  readonly #measure: Measure;
  readonly #listeners = new Set<Listener>();
  #status: CaptureStatus = 'running';
  #stage: StageName | null = null;
  #failure: FailureDetail | null = null;
  #result: CaptureResult | null = null;
  #endedAtMs: number | null = null;
  #vmRunning: boolean | null = null;
  #totalMs: number | null = null;

  constructor(
    ids: { readonly captureId: CaptureId; readonly vmId: VmId },
    measure: Measure,
    observer: CaptureObserver,
  ) {
    this.captureId = ids.captureId;
    this.vmId = ids.vmId;
    this.#createdAtMs = measure.wallMs();
    this.#measure = measure;
    this.#observer = observer;
  }

  get hasEnded(): boolean {
    return this.#endedAtMs !== null;
  }

  view(): CaptureView {
    const frozen = this.#measure.frozen();
    const frozenMs = frozen === undefined ? 0 : frozen.endMs - frozen.startMs;
    const totalMs = this.#totalMs ?? this.#measure.now();
    return {
      captureId: this.captureId,
      vmId: this.vmId,
      status: this.#status,
      stage: this.#stage,
      createdAtMs: this.#createdAtMs,
      endedAtMs: this.#endedAtMs,
      result: this.#result === null ? null : { ...this.#result, frozenMs, totalMs },
      stages: this.#measure
        .stages()
        .filter((stage) => stage !== undefined)
        .map((stage) => reportOf(stage, frozen)),
      failure: this.#failure,
      vmRunning: this.#vmRunning,
    };
  }

  listen(listener: Listener): () => void {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  started(): void {
    this.#observer.started(this.view());
    this.#tell();
  }

  stage(stage: StageName, state: 'started' | 'ended'): void {
    if (state === 'started') this.#stage = stage;
    this.#observer.stage(this.view(), stage, state);
    for (const listener of this.#listeners) listener({ type: 'stage', stage, state });
  }

  committed(result: CaptureResult): void {
    this.#status = 'committed';
    this.#result = result;
    this.#tell();
  }

  published(published: Published): void {
    this.#status = 'published';
    this.#failure = null;
    if (this.#result !== null) this.#result = publishedAs(this.#result, published);
  }

  publishFailed({ kind, message, retryable }: PublishFailure): void {
    this.#failure = { kind, message };
    this.#observer.publishFailed(this.view(), { kind, message, retryable });
    this.#tell();
  }

  /** The epoch is committed; its publish is left to recovery, or can't succeed. */
  leftCommitted(failure: FailureDetail): void {
    this.#failure ??= failure;
  }

  aborted(failure: FailureDetail): void {
    this.#status = 'aborted';
    this.#failure = failure;
  }

  /** After the VM runs, or can't be made to. */
  ended(freeze: Freeze): void {
    const frozen = freeze.span;
    this.#vmRunning = runningAfter(freeze);
    this.#totalMs = this.#measure.now();
    this.#endedAtMs = this.#measure.wallMs();
    this.#stage = null;
    const view = this.view();
    if (frozen !== undefined) this.#observer.frozen(view, frozen.endMs - frozen.startMs);
    this.#observer.reached(view);
    this.#tell();
  }

  /** What the capture made, from what its stages counted. */
  resultOf(of: {
    readonly sealed: SealedLayer;
    readonly plan: PublishPlan;
    readonly intent: EpochIntent;
    readonly counts: Counts;
    readonly source: DirtySource;
    readonly resumeAfter: ResumeAfter;
    readonly advance: boolean;
  }): CaptureResult {
    const { sealed, plan, intent, counts } = of;
    const named = of.advance && !of.source.cumulative ? 'epoch' : 'cumulative';
    return {
      snapshotId: plan.snapshotId,
      alias: plan.alias,
      aliasProblem: null,
      layer: sealed.uuid,
      predecessor: sealed.parentUuid,
      digest: sealed.digest,
      layerBytes: sealed.sizeBytes,
      dataBytes: sealed.dataBytes,
      zeroedBytes: sealed.zeroedBytes,
      selectedPages: counts.selectedPages,
      deduplicatedPages: counts.equalPages,
      zeroPages: counts.zeroPages,
      precopyRounds: counts.precopyRounds,
      precopiedPages: counts.precopiedPages,
      supersededBytes: sealed.supersededBytes,
      imageBytes: plan.imageBytes,
      chainDepth: (intent.memoryParent?.depth ?? 0) + 1,
      epoch: intent.epoch,
      selection: intent.widen === null ? named : 'widened',
      selectionReason: intent.widen?.reason ?? null,
      shadow: counts.shadow,
      verify: counts.verify,
      frozenMs: 0,
      totalMs: 0,
      resumeAfter: of.resumeAfter,
    };
  }

  #tell(): void {
    const capture = this.view();
    for (const listener of this.#listeners) listener({ type: 'status', capture });
  }
}

/** The result of a capture, once it is known under which name it was published. */
export function publishedAs(result: CaptureResult, published: Published): CaptureResult {
  const { snapshotId, aliasProblem } = published;
  const alias = aliasProblem === null ? result.alias : null;
  return { ...result, snapshotId, alias, aliasProblem };
}

/** Null: never stopped by this capture, so not known. */
function runningAfter(freeze: Freeze): boolean | null {
  if (freeze.state === 'resumed') return true;
  return freeze.state === 'stuck' ? false : null;
}

function reportOf(stage: StageMeasure, frozen: Span | undefined): StageReport {
  const span = { startMs: stage.startedMs, endMs: stage.endedMs };
  return { ...stage, frozenMs: frozen === undefined ? 0 : overlapMs(span, frozen) };
}
