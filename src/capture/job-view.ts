/** A capture as node.db remembers it, after its run has ended or in another life of the daemon. */
import type { CaptureJob } from '../lineage/jobs.queries.ts';
import type { CaptureResult, CaptureStatus, CaptureView, StageReport } from './types.ts';

/** What is kept of a finished run beside the job's own columns. */
export interface KeptResult {
  readonly result: CaptureResult | null;
  readonly stages: readonly StageReport[];
  readonly vmRunning: boolean | null;
  /** Why a committed capture was not published by its own run. */
  readonly failure?: CaptureView['failure'];
}

export function keptJson(view: CaptureView): string {
  const kept: KeptResult = {
    result: view.result,
    stages: view.stages,
    vmRunning: view.vmRunning,
    failure: view.status === 'committed' ? view.failure : null,
  };
  return JSON.stringify(kept);
}

const statusOf = (job: CaptureJob): CaptureStatus => {
  if (job.step === 'committed' || job.step === 'published' || job.step === 'aborted') {
    return job.step;
  }
  return 'running';
};

export function viewOfJob(job: CaptureJob): CaptureView {
  const kept = job.resultJson === null ? null : (JSON.parse(job.resultJson) as KeptResult);
  return {
    captureId: job.captureId,
    vmId: job.vmId,
    status: statusOf(job),
    stage: null,
    createdAtMs: job.createdAtMs,
    endedAtMs: job.finishedAtMs,
    result: kept?.result ?? null,
    stages: kept?.stages ?? [],
    failure: job.failure ?? (job.step === 'committed' ? (kept?.failure ?? null) : null),
    vmRunning: kept?.vmRunning ?? null,
  };
}
