/**
 * What callers of a capture see: requests, views, events and failures. Plain data only: everything
 * here crosses HTTP as it stands (sizes as JSON numbers below 2^53, addresses never).
 */
import type { StageName } from '../stage-names.ts';
import type { ShadowReport } from '../vmm/shadow.ts';
import type { VerifyReport } from './verify.ts';
import type { CaptureId, Digest, LayerUuid, SnapshotId, VmId } from '../units.ts';

export type TrackingMode = 'mincore' | 'dirty' | 'pagemap';
export type Dialect = 'firecracker' | 'aenv' | 'e2b';
export type ResumeAfter = 'publish' | 'commit' | 'copy';
export type DedupMode = 'auto' | 'off' | 'parent';

export { stageNames, type StageName } from '../stage-names.ts';

export interface AttachRequest {
  /** The VMM's API socket; must lie under a configured socket root. */
  readonly socketPath: string;
  /** Name of the VM; the VMM's own instance id where absent. */
  readonly vmId?: string | undefined;
  /** Default: `memory_snapshot.tracking_mode`. */
  readonly trackingMode?: TrackingMode | undefined;
  /** The snapshot whose memory image the VMM process was started from; absent for a fresh VM. */
  readonly launchParent?: SnapshotId | undefined;
}

export interface VmView {
  readonly vmId: VmId;
  readonly socketPath: string;
  readonly pid: number;
  readonly dialect: Dialect;
  readonly vmmVersion: string;
  readonly trackingMode: TrackingMode;
  readonly epoch: number;
  /**
   * Head of the chain the next capture's layer sits on; null before the first capture of a fresh
   * VM.
   */
  readonly memoryParent: LayerUuid | null;
  readonly launchParent: LayerUuid | null;
  readonly chainDepth: number;
  readonly imageBytes: number | null;
  readonly pausedByUs: boolean;
  /** The running capture, if any. */
  readonly captureId: CaptureId | null;
  /**
   * `gone` once the process has exited or the socket belongs to another one; `unreachable` while its
   * VMM has not answered since the daemon started, which is tried again.
   */
  readonly state: 'attached' | 'unreachable' | 'gone';
}

export interface CaptureRequest {
  readonly resumeAfter?: ResumeAfter | undefined;
  readonly dedup?: DedupMode | undefined;
  readonly alias?: string | undefined;
  readonly idempotencyKey?: string | undefined;
  /** Longest frozen time, milliseconds; default `capture.pause_deadline`. */
  readonly pauseDeadlineMs?: number | undefined;
  /**
   * Rounds of copying before the pause, at most; default `pipeline.precopy.rounds`. More than 0 is
   * refused as `precopy-unsupported` where the VM's dirty set cannot be read while it runs.
   */
  readonly precopyRounds?: number | undefined;
  /**
   * Compare every page that the dirty set does not name with what the memory parent reads, while the
   * VM is paused. Nothing is copied ahead of the pause then. Default: false.
   */
  readonly verify?: boolean | undefined;
  /** The daemon's own: the snapshot is retired as soon as it is published, unless pages were lost. */
  readonly transient?: boolean | undefined;
}

export interface StageReport {
  readonly stage: StageName;
  /** Milliseconds after the capture began. */
  readonly startedMs: number;
  readonly endedMs: number;
  /** Time in which at least one item of the stage was being worked on, milliseconds. */
  readonly busyMs: number;
  /** The part of `startedMs..endedMs` that lies in the frozen time, milliseconds. */
  readonly frozenMs: number;
  readonly items: number;
  readonly bytes: number;
}

export interface CaptureResult {
  readonly snapshotId: SnapshotId;
  /** The snapshot's name; null where none was asked for, or it was taken: see `aliasProblem`. */
  readonly alias: string | null;
  /** `alias-taken`: another snapshot got the name first. This one is published all the same. */
  readonly aliasProblem: { readonly kind: string; readonly message: string } | null;
  readonly layer: LayerUuid;
  readonly predecessor: LayerUuid | null;
  readonly digest: Digest;
  /** Size of the layer file, bytes. */
  readonly layerBytes: number;
  /** Guest bytes stored in the layer. */
  readonly dataBytes: number;
  readonly zeroedBytes: number;
  readonly selectedPages: number;
  /** Pages dropped because the memory parent already reads the same. */
  readonly deduplicatedPages: number;
  readonly zeroPages: number;
  /** Rounds that were copied before the pause. */
  readonly precopyRounds: number;
  /** Selected pages that the pause did not have to copy, since a round had. */
  readonly precopiedPages: number;
  /** Guest bytes in the layer file that were copied in a round and again later. */
  readonly supersededBytes: number;
  readonly imageBytes: number;
  readonly chainDepth: number;
  readonly epoch: number;
  readonly selection: 'epoch' | 'cumulative' | 'widened';
  /** Why the selection is wider than the epoch's own set; null where it is not. */
  readonly selectionReason: string | null;
  /**
   * What the shadow check found, in pages: `shadowOnly` were missed by the VMM, and captured all the
   * same. Null where it is off.
   */
  readonly shadow: ShadowReport | null;
  /**
   * What a verifying capture found: pages that no dirty set named and that differ from the memory
   * parent were lost before; this snapshot has them. Null where nothing was verified.
   */
  readonly verify: VerifyReport | null;
  /**
   * From sending the pause to the answer to the resume, milliseconds; 0 where the owner had paused
   * the VM.
   */
  readonly frozenMs: number;
  readonly totalMs: number;
  readonly resumeAfter: ResumeAfter;
}

/** `committed`: the epoch has advanced and the publish is still to come. */
export type CaptureStatus = 'running' | 'committed' | 'published' | 'aborted';

export interface CaptureView {
  readonly captureId: CaptureId;
  readonly vmId: VmId;
  readonly status: CaptureStatus;
  readonly stage: StageName | null;
  readonly createdAtMs: number;
  readonly endedAtMs: number | null;
  readonly result: CaptureResult | null;
  readonly stages: readonly StageReport[];
  /** The original error; null unless aborted, or committed with a publish that keeps failing. */
  readonly failure: { readonly kind: string; readonly message: string } | null;
  readonly vmRunning: boolean | null;
}

export type CaptureEvent =
  | { readonly type: 'stage'; readonly stage: StageName; readonly state: 'started' | 'ended' }
  | { readonly type: 'status'; readonly capture: CaptureView };

export interface ForkRequest extends CaptureRequest {
  /** One not-yet-started VMM per child. */
  readonly children: readonly { readonly socketPath: string; readonly vmId?: string | undefined }[];
}

export interface ForkView {
  readonly capture: CaptureView;
  readonly children: readonly {
    readonly socketPath: string;
    readonly vm: VmView | null;
    /** Beside a `vm`: it is on record, but paused, and could not be taken off it. */
    readonly failure: { readonly kind: string; readonly message: string } | null;
  }[];
}

export interface ServiceError {
  /** Stable code; `src/api` maps each to a status. */
  readonly kind: string;
  readonly message: string;
  /** Ids and numbers a program may act on, such as the running capture of a 409. */
  readonly facts?: Readonly<Record<string, string | number | null>>;
}

/** The daemon's captures, as the API and the CLI drive them. */
export interface Captures {
  attach(request: AttachRequest): Promise<Outcome<VmView>>;
  listVms(): readonly VmView[];
  getVm(vmId: VmId): VmView | undefined;
  /** Of layers that were captured on this node and are still here as captured. */
  epochsOf(layers: readonly LayerUuid[]): ReadonlyMap<LayerUuid, number>;
  /** Refused while a capture of the VM runs. Local layers that nothing else needs are released. */
  detach(vmId: VmId): Promise<Outcome<null>>;
  /** Answers once the job is durable; the capture goes on whether or not its caller waits. */
  startCapture(vmId: VmId, request: CaptureRequest): Promise<Outcome<CaptureView>>;
  getCapture(captureId: CaptureId): CaptureView | undefined;
  listCaptures(vmId?: VmId): readonly CaptureView[];
  cancelCapture(captureId: CaptureId): Promise<Outcome<CaptureView>>;
  /** Replays nothing: events from now on, then ends when the capture has ended. */
  watch(captureId: CaptureId, signal: AbortSignal): AsyncIterable<CaptureEvent>;
  /** Resolves when the capture is published or aborted. */
  waitFor(captureId: CaptureId, signal: AbortSignal): Promise<CaptureView>;
  fork(vmId: VmId, request: ForkRequest): Promise<Outcome<ForkView>>;
  /** Aborts what may be aborted, resumes every VM, waits for all of it. */
  close(): Promise<void>;
}

export type Outcome<T> =
  { readonly ok: true; readonly value: T } | { readonly ok: false; readonly error: ServiceError };
