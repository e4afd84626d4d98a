/** Turns what captures tell into metrics, spans and log lines. */
import { statSync } from 'node:fs';
import type { CaptureObserver } from '../capture/observer.ts';
import type { CaptureView } from '../capture/types.ts';
import { logFor, type Logger } from '../observability/log.ts';
import type { CaptureRecord, Metrics } from '../observability/metrics.ts';
import type { CaptureTrace, CaptureTracer, StepTrace } from '../observability/trace.ts';

interface Followed {
  readonly record: CaptureRecord;
  readonly trace: CaptureTrace;
  readonly logger: Logger;
  readonly steps: Map<string, StepTrace>;
}

/** The weights of all queues of a name, added up. A queue at 0 costs nothing. */
class Weights {
  readonly #cells = new Map<object, { readonly name: string; weight: number }>();

  gauge(name: string): (weight: number) => void {
    const cell = {};
    return (weight) => {
      if (weight === 0) this.#cells.delete(cell);
      else this.#cells.set(cell, { name, weight });
    };
  }

  totals(): Map<string, number> {
    const sums = new Map<string, number>();
    for (const { name, weight } of this.#cells.values()) {
      sums.set(name, (sums.get(name) ?? 0) + weight);
    }
    return sums;
  }
}

export interface ObserverDeps {
  readonly metrics: Metrics;
  readonly tracer: CaptureTracer;
  readonly logger: Logger;
  /** Bound of the named queue, where it has one. */
  readonly queueMax: (name: string) => number | undefined;
  readonly slabBudget: number;
}

export function createObserver(deps: ObserverDeps): CaptureObserver {
  const { metrics } = deps;
  const weights = new Weights();
  const names = new Set<string>();
  let slabBytes = 0;
  metrics.observe({
    queues: () => {
      const totals = weights.totals();
      return [...names].map((stage) => ({
        stage,
        depth: totals.get(stage) ?? 0,
        max: deps.queueMax(stage) ?? 0,
      }));
    },
    slabs: () => ({ used: slabBytes, total: deps.slabBudget }),
  });
  return {
    queue: (name) => {
      names.add(name);
      return weights.gauge(name);
    },
    slabBytes: (weight) => (slabBytes = weight),
    ...captureEvents(deps),
  };
}

function captureEvents(deps: ObserverDeps): Omit<CaptureObserver, 'queue' | 'slabBytes'> {
  const { metrics, tracer, logger } = deps;
  const followed = new Map<string, Followed>();
  const loggerOf = (capture: CaptureView): Logger =>
    followed.get(capture.captureId)?.logger ??
    logFor(logger, { capture: capture.captureId, vm: capture.vmId });
  return {
    started(capture) {
      const { captureId, vmId } = capture;
      const trace = tracer.begin({ captureId, vmId });
      const ids = { capture: captureId, vm: vmId, trace: trace.traceId };
      const own = { record: metrics.captureStarted(), trace, logger: logFor(logger, ids) };
      followed.set(captureId, { ...own, steps: new Map() });
      own.logger.info('capture started');
    },
    stage(capture, stage, state) {
      const own = followed.get(capture.captureId);
      if (own === undefined) return;
      if (state === 'started') own.steps.set(stage, own.trace.stage(stage));
      else own.steps.get(stage)?.end();
    },
    frozen: (capture, frozenMs) => metrics.frozen(frozenMs, capture.stages),
    publishFailed(capture, failure) {
      metrics.publishFailed(failure.kind);
      const next = failure.retryable ? 'will be' : 'cannot be';
      loggerOf(capture).warn({ failure }, `publish failed and ${next} tried again`);
    },
    reached(capture) {
      finish(capture, followed.get(capture.captureId), metrics);
      followed.delete(capture.captureId);
      const facts = { result: capture.result, failure: capture.failure };
      if (capture.status === 'aborted') loggerOf(capture).warn(facts, 'capture aborted');
      else loggerOf(capture).info(facts, `capture ${capture.status}`);
    },
    shadowed({ captureId, vmId }, report) {
      metrics.shadowed(report);
      if (report.compared === 'nothing' || report.shadowOnly === 0) return;
      const facts = { capture: captureId, vm: vmId, report };
      logger.warn(facts, 'the VMM missed pages that its page tables show as written');
    },
    verified({ captureId, vmId }, report) {
      metrics.verified(report);
      if (report.compared === 'nothing') return;
      const facts = { capture: captureId, vm: vmId, report };
      if (report.differing > 0) logger.error(facts, 'layers of a VM had lost pages');
      else logger.info(facts, 'every page of a VM was compared with its layers');
    },
    compacted(report) {
      metrics.chainCompacted({ writtenBytes: report.rewrittenBytes });
      logger.info(report, 'chain compacted');
    },
    recovered: (what) => metrics.recovered(what),
    warn: (what, facts) => logger.warn(facts, what),
  };
}

function finish(capture: CaptureView, own: Followed | undefined, metrics: Metrics): void {
  const { status, failure, result, stages } = capture;
  if (status === 'running') return;
  for (const step of own?.steps.values() ?? []) step.end();
  own?.record.end(status, failure?.kind ?? null);
  own?.trace.end({ failure });
  if (result === null) return;
  metrics.captured(result);
  metrics.captureTime(result.totalMs, stages);
  const publish = stages.find((stage) => stage.stage === 'publish');
  if (status === 'published' && publish !== undefined) {
    metrics.published((publish.endedMs - publish.startedMs) / 1000);
  }
}

/** Size of a SQLite database's write-ahead log; 0 where there is none. */
export function walBytes(databasePath: string): number {
  return statSync(`${databasePath}-wal`, { throwIfNoEntry: false })?.size ?? 0;
}
