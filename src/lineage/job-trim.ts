/** Forgets old capture jobs, so that node.db does not grow with every capture ever made. */
import type { Clock } from '../clock.ts';
import type { FailureDetail } from '../result.ts';
import type { NodeDb } from './node-db.ts';

export interface JobTrimDeps {
  readonly db: Pick<NodeDb, 'trimJobs'>;
  readonly clock: Clock;
  /** `capture.job_retention`: how long an ended capture is shown, milliseconds. */
  readonly retentionMs: number;
  /** A trim that failed is tried again at the next turn. */
  readonly onFailed: (failure: FailureDetail) => void;
}

/** Time between turns: how much later than asked a job may go, milliseconds. */
const turnMs = 10 * 60_000;

/** Jobs per transaction; captures run between two of them. */
const batchMax = 500;

/** Trims now and every ten minutes until `signal` aborts. Never rejects. */
export async function keepTrimming(deps: JobTrimDeps, signal: AbortSignal): Promise<void> {
  while (!signal.aborted) {
    await trimAll(deps, signal);
    await deps.clock.sleep(turnMs, signal).catch(() => undefined);
  }
}

async function trimAll(deps: JobTrimDeps, signal: AbortSignal): Promise<void> {
  const beforeMs = deps.clock.nowMs() - deps.retentionMs;
  while (!signal.aborted) {
    const trimmed = deps.db.trimJobs(beforeMs, batchMax);
    if (!trimmed.ok) deps.onFailed(trimmed.error);
    if (!trimmed.ok || trimmed.value < batchMax) return;
    await new Promise((resolve) => setImmediate(resolve));
  }
}
