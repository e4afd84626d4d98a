/**
 * Who wants to know what captures do: metrics, traces and logs are made from these calls, and only
 * from these.
 */
import type { CompactionReport } from '../lineage/compaction.ts';
import type { QueueGauge } from '../pipeline/queue.ts';
import type { CaptureId, VmId } from '../units.ts';
import type { ShadowReport } from '../vmm/shadow.ts';
import type { CaptureView, StageName } from './types.ts';
import type { VerifyReport } from './verify.ts';

export interface Gauges {
  /** Weight waiting in a named queue. */
  readonly queue: (name: string) => QueueGauge;
  /** Bytes of slabs in use. */
  readonly slabBytes: QueueGauge;
}

export interface CaptureObserver extends Gauges {
  readonly started: (capture: CaptureView) => void;
  readonly stage: (capture: CaptureView, stage: StageName, state: 'started' | 'ended') => void;
  /** Once for each real pause, on every outcome. */
  readonly frozen: (capture: CaptureView, frozenMs: number) => void;
  readonly publishFailed: (
    capture: CaptureView,
    failure: { kind: string; message: string; retryable: boolean },
  ) => void;
  /** The capture is committed, published or aborted; each of the states it reaches, once. */
  readonly reached: (capture: CaptureView) => void;
  /** Once for each fetch with a shadow check, whatever becomes of the capture. */
  readonly shadowed: (
    capture: { readonly captureId: CaptureId; readonly vmId: VmId },
    report: ShadowReport,
  ) => void;
  /** Once for each verifying capture that came to its commit. */
  readonly verified: (
    capture: { readonly captureId: CaptureId; readonly vmId: VmId },
    report: VerifyReport,
  ) => void;
  readonly compacted: (report: CompactionReport) => void;
  /** Once for each thing that start-up had to put right. */
  readonly recovered: (what: 'resumed' | 'aborted' | 'finished' | 'published') => void;
  /** Something an operator should know that ends no capture. */
  readonly warn: (what: string, facts: Readonly<Record<string, unknown>>) => void;
}

export const silentObserver: CaptureObserver = {
  queue: () => () => undefined,
  slabBytes: () => undefined,
  started: () => undefined,
  stage: () => undefined,
  frozen: () => undefined,
  publishFailed: () => undefined,
  reached: () => undefined,
  shadowed: () => undefined,
  verified: () => undefined,
  compacted: () => undefined,
  recovered: () => undefined,
  warn: () => undefined,
};
