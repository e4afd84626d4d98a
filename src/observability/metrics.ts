/**
 * Every instrument of the daemon, made once from a meter provider, and the functions that record
 * into them. Names are `varve_<noun>_<unit>[_total]` in base units. Labels are bounded: a stage,
 * an outcome, a failure kind, a route pattern; never an id.
 */
import type { Attributes, Meter, MeterProvider } from '@opentelemetry/api';

export type CaptureOutcome = 'published' | 'committed' | 'aborted';

/** What a stage took of one capture. A `StageReport` of the capture fits. */
export interface StageTime {
  readonly stage: string;
  readonly startedMs: number;
  readonly endedMs: number;
  readonly busyMs: number;
  readonly frozenMs: number;
}

/** What a committed capture selected and wrote. A `CaptureResult` fits. */
export interface CaptureAmounts {
  readonly selectedPages: number;
  readonly deduplicatedPages: number;
  readonly zeroPages: number;
  readonly precopiedPages: number;
  readonly supersededBytes: number;
  readonly layerBytes: number;
  readonly dataBytes: number;
  readonly chainDepth: number;
  readonly selection: string;
}

/** Pages that two sources were compared on. */
export interface ShadowPages {
  readonly compared: 'all' | 'not-stored-yet';
  readonly both: number;
  readonly primaryOnly: number;
  readonly shadowOnly: number;
}

/** Pages that no dirty set named, compared with what the layers read. */
export interface VerifiedPages {
  readonly compared: 'all';
  readonly pages: number;
  readonly differing: number;
}

export interface CatalogCounts {
  /** Of this node. */
  readonly openHolds: number;
  /** Objects queued for deletion, by whichever node. */
  readonly gcBacklog: number;
}

/** Numbers that are read when metrics are collected, not when they change. */
export interface Observed {
  /** Items waiting before each stage, and the configured bound, over all captures. */
  readonly queues?: () => Iterable<{
    readonly stage: string;
    readonly depth: number;
    readonly max: number;
  }>;
  readonly slabs?: () => { readonly used: number; readonly total: number };
  readonly vms?: () => { readonly attached: number; readonly gone: number };
  /** VMs that a capture paused and that could not be resumed yet. */
  readonly stuckPaused?: () => number;
  readonly pendingReleases?: () => number;
  readonly pendingPublishes?: () => number;
  /** Null where the catalog does not answer in time: then it is down, and has no counts. */
  readonly catalog?: () => Promise<CatalogCounts | null>;
  /** Size of each write-ahead log, by database (`node`, `catalog`). */
  readonly walBytes?: () => Iterable<{ readonly db: string; readonly bytes: number }>;
}

/** One started capture. `end` counts it once, however often it is called. */
export interface CaptureRecord {
  end(outcome: CaptureOutcome, reason: string | null): void;
}

export interface Metrics {
  captureStarted(): CaptureRecord;
  /** Once per real pause, whatever became of the capture. */
  frozen(frozenMs: number, stages: readonly StageTime[]): void;
  captureTime(totalMs: number, stages: readonly StageTime[]): void;
  captured(amounts: CaptureAmounts): void;
  published(seconds: number): void;
  publishFailed(kind: string): void;
  /** A fetch with a shadow check; a `ShadowReport` fits. */
  shadowed(report: ShadowPages | { readonly compared: 'nothing' }): void;
  /** A verifying capture; a `VerifyReport` fits. */
  verified(report: VerifiedPages | { readonly compared: 'nothing' }): void;
  chainCompacted(amounts: { readonly writtenBytes: number }): void;
  gcRun(run: {
    readonly outcome: 'done' | 'stopped' | 'failed';
    readonly seconds: number;
    readonly condemned: number;
    readonly reclaimed: number;
    readonly reclaimedBytes: number;
    readonly trimmed: number;
  }): void;
  held(purpose: string): void;
  released(count: number): void;
  recovered(what: 'resumed' | 'aborted' | 'finished' | 'published'): void;
  httpRequest(request: {
    readonly method: string;
    /** The route's pattern, never the path as sent. */
    readonly route: string;
    readonly status: number;
    readonly seconds: number;
  }): void;
  /**
   * Adds sources for the gauges. Call once per process part; the returned function takes them
   * away.
   */
  observe(observed: Observed): () => void;
}

const secondsBuckets = [
  0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300,
];
const pagesBuckets = [0, 1, 16, 256, 1024, 4096, 16_384, 65_536, 262_144, 1_048_576, 16_777_216];
const bytesBuckets = [4096, 65_536, 1 << 20, 1 << 24, 1 << 26, 1 << 28, 1 << 30, 2 ** 33, 2 ** 36];
const depthBuckets = [1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 192, 255];

const REASONS_MAX = 64;
const reasonPattern = /^[a-z][a-z0-9-]{0,47}$/;

/**
 * Keeps a label bounded: kinds as they are, anything else and any kind past the bound is
 * `other`.
 */
function boundedLabel(): (value: string) => string {
  const seen = new Set<string>();
  return (value) => {
    if (!reasonPattern.test(value)) return 'other';
    if (seen.has(value)) return value;
    if (seen.size >= REASONS_MAX) return 'other';
    seen.add(value);
    return value;
  };
}

function instruments(meter: Meter) {
  const counter = (name: string, description: string) => meter.createCounter(name, { description });
  const histogram = (name: string, description: string, explicitBucketBoundaries: number[]) =>
    meter.createHistogram(name, { description, advice: { explicitBucketBoundaries } });
  const seconds = (name: string, description: string) =>
    histogram(name, description, secondsBuckets);
  return {
    captures: counter('varve_captures_total', 'Captures that ended.'),
    inFlight: meter.createUpDownCounter('varve_captures_in_flight', {
      description: 'Captures that have begun and not ended.',
    }),
    captureSeconds: seconds('varve_capture_seconds', 'Whole captures, from request to end.'),
    stageSeconds: seconds('varve_stage_seconds', 'Time from start to end of a stage, by capture.'),
    stageBusySeconds: seconds('varve_stage_busy_seconds', 'Time in which a stage worked.'),
    frozenSeconds: seconds('varve_frozen_seconds', 'Time a VM was paused by a capture.'),
    stageFrozenSeconds: seconds('varve_stage_frozen_seconds', 'Frozen time spent in each stage.'),
    selections: counter(
      'varve_selections_total',
      'Committed captures, by how pages were selected.',
    ),
    selectedPages: histogram('varve_selected_pages', 'Pages selected per capture.', pagesBuckets),
    deduplicated: counter('varve_deduplicated_pages_total', 'Pages that the parent already had.'),
    zeroPages: counter('varve_zero_pages_total', 'Selected pages that were all zero.'),
    precopiedPages: counter(
      'varve_precopied_pages_total',
      'Selected pages that were copied before the pause and not again.',
    ),
    supersededBytes: counter(
      'varve_superseded_bytes_total',
      'Bytes of layers that were copied before the pause and again later.',
    ),
    layerBytes: histogram('varve_layer_bytes', 'Size of sealed layer files.', bytesBuckets),
    dataBytes: counter('varve_layer_data_bytes_total', 'Guest bytes stored in layers.'),
    chainDepth: histogram('varve_chain_depth', 'Depth of the chain after a commit.', depthBuckets),
    publishes: counter('varve_publishes_total', 'Attempts to publish a snapshot.'),
    publishSeconds: seconds('varve_publish_seconds', 'From commit to the snapshot being visible.'),
    shadowChecks: counter('varve_shadow_checks_total', 'Shadow checks, by what was compared.'),
    shadowPages: counter('varve_shadow_pages_total', 'Pages compared, by the sources naming them.'),
    verifications: counter('varve_verifications_total', 'Verifying captures, by outcome.'),
    verifiedPages: counter('varve_verified_pages_total', 'Pages compared with the layers.'),
    lostPages: counter('varve_lost_pages_total', 'Pages that layers were found to have lost.'),
    compactions: counter('varve_compactions_total', 'Merges of chain layers.'),
    compactWritten: counter('varve_compaction_written_bytes_total', 'Bytes that merges wrote.'),
    gcRuns: counter('varve_gc_runs_total', 'Garbage collections.'),
    gcSeconds: seconds('varve_gc_seconds', 'Garbage collections, from start to end.'),
    gcCondemned: counter('varve_gc_condemned_total', 'Rows that the catalog forgot as garbage.'),
    gcReclaimed: counter('varve_gc_reclaimed_total', 'Artifacts whose bytes were deleted.'),
    gcReclaimedBytes: counter('varve_gc_reclaimed_bytes_total', 'Bytes deleted from the store.'),
    gcTrimmed: counter('varve_gc_trimmed_total', 'Old closed holds and retired snapshots removed.'),
    holds: counter('varve_holds_taken_total', 'Holds taken, by purpose.'),
    releases: counter('varve_holds_released_total', 'Holds released.'),
    recoveries: counter('varve_recoveries_total', 'What start-up had to put right.'),
    requests: counter('varve_http_requests_total', 'Answered HTTP requests.'),
    requestSeconds: seconds('varve_http_request_seconds', 'Time to answer HTTP requests.'),
  };
}

type Observer = (report: (value: number, attributes?: Attributes) => void) => void;

/** Gauges over all observed parts: the values of parts with the same labels are added up. */
function gauges(meter: Meter, parts: ReadonlySet<Observed>): void {
  const each = (read: (part: Observed) => void): void => parts.forEach(read);
  const gauge = (name: string, description: string, observe: Observer): void => {
    meter.createObservableGauge(name, { description }).addCallback((result) => {
      const sums = new Map<string, { value: number; attributes: Attributes }>();
      observe((value, attributes = {}) => {
        const key = JSON.stringify(attributes);
        sums.set(key, { value: (sums.get(key)?.value ?? 0) + value, attributes });
      });
      for (const { value, attributes } of sums.values()) result.observe(value, attributes);
    });
  };
  const simple = (
    name: string,
    description: string,
    pick: (part: Observed) => (() => number) | undefined,
  ): void =>
    gauge(name, description, (report) =>
      each((part) => {
        const read = pick(part);
        if (read !== undefined) report(read());
      }),
    );
  gauge('varve_queue_depth', 'Items waiting before a stage.', (report) =>
    each((part) => {
      for (const { stage, depth } of part.queues?.() ?? []) report(depth, { stage });
    }),
  );
  gauge('varve_queue_max', 'Bound of the queue before a stage.', (report) =>
    each((part) => {
      for (const { stage, max } of part.queues?.() ?? []) report(max, { stage });
    }),
  );
  simple('varve_slabs_used', 'Slabs that hold guest bytes.', (p) => {
    const read = p.slabs;
    return read && (() => read().used);
  });
  simple('varve_slabs', 'Slabs there are.', (p) => {
    const read = p.slabs;
    return read && (() => read().total);
  });
  gauge('varve_vms', 'VMs the daemon knows.', (report) =>
    each((part) => {
      const vms = part.vms?.();
      if (vms === undefined) return;
      report(vms.attached, { state: 'attached' });
      report(vms.gone, { state: 'gone' });
    }),
  );
  const stuck = 'VMs that a capture paused and that could not be resumed yet.';
  simple('varve_vms_stuck_paused', stuck, (p) => p.stuckPaused);
  simple('varve_releases_pending', 'Releases queued for the catalog.', (p) => p.pendingReleases);
  simple('varve_publishes_pending', 'Commits not yet published.', (p) => p.pendingPublishes);
  gauge('varve_wal_bytes', 'Size of the write-ahead log.', (report) =>
    each((part) => {
      for (const { db, bytes } of part.walBytes?.() ?? []) report(bytes, { db });
    }),
  );
}

/** One question to the catalog for all three gauges, each time metrics are collected. */
function catalogGauges(meter: Meter, parts: ReadonlySet<Observed>): void {
  const gauge = (name: string, description: string) =>
    meter.createObservableGauge(name, { description });
  const holds = gauge('varve_holds_open', 'Holds that this node has.');
  const backlog = gauge('varve_gc_backlog', 'Artifacts queued for deletion.');
  const up = gauge('varve_catalog_up', 'Whether the catalog answers: 1, or 0.');
  meter.addBatchObservableCallback(
    async (result) => {
      for (const part of parts) {
        if (part.catalog === undefined) continue;
        const counts = await part.catalog();
        result.observe(up, counts === null ? 0 : 1);
        if (counts === null) continue;
        result.observe(holds, counts.openHolds);
        result.observe(backlog, counts.gcBacklog);
      }
    },
    [up, holds, backlog],
  );
}

/** Makes every instrument. Once per provider: a second call would register them twice. */
export function createMetrics(provider: MeterProvider): Metrics {
  const meter = provider.getMeter('varve');
  const made = instruments(meter);
  // An alert on an increase misses the first one of a series that was not there before.
  for (const seen of ['both', 'primary', 'shadow']) made.shadowPages.add(0, { seen_by: seen });
  for (const outcome of ['right', 'lost', 'not-compared']) made.verifications.add(0, { outcome });
  made.verifiedPages.add(0);
  made.lostPages.add(0);
  const parts = new Set<Observed>();
  gauges(meter, parts);
  catalogGauges(meter, parts);
  return { ...captureMetrics(made), ...catalogMetrics(made), observe: observer(parts) };
}

const observer = (parts: Set<Observed>) => (observed: Observed) => {
  parts.add(observed);
  return () => void parts.delete(observed);
};

type Made = ReturnType<typeof instruments>;

function captureMetrics(made: Made) {
  const reason = boundedLabel();
  return {
    captureStarted(): CaptureRecord {
      made.inFlight.add(1);
      let ended = false;
      return {
        end(outcome, why) {
          if (ended) return;
          ended = true;
          made.inFlight.add(-1);
          made.captures.add(1, { outcome, reason: why === null ? 'none' : reason(why) });
        },
      };
    },
    frozen(frozenMs: number, stages: readonly StageTime[]): void {
      made.frozenSeconds.record(frozenMs / 1000);
      for (const { stage, frozenMs: ms } of stages) {
        made.stageFrozenSeconds.record(ms / 1000, { stage });
      }
    },
    captureTime(totalMs: number, stages: readonly StageTime[]): void {
      made.captureSeconds.record(totalMs / 1000);
      for (const time of stages) {
        const { stage } = time;
        made.stageSeconds.record((time.endedMs - time.startedMs) / 1000, { stage });
        made.stageBusySeconds.record(time.busyMs / 1000, { stage });
      }
    },
    captured(amounts: CaptureAmounts): void {
      made.selectedPages.record(amounts.selectedPages);
      made.deduplicated.add(amounts.deduplicatedPages);
      made.zeroPages.add(amounts.zeroPages);
      made.precopiedPages.add(amounts.precopiedPages);
      made.supersededBytes.add(amounts.supersededBytes);
      made.layerBytes.record(amounts.layerBytes);
      made.dataBytes.add(amounts.dataBytes);
      made.chainDepth.record(amounts.chainDepth);
      made.selections.add(1, { selection: amounts.selection });
    },
    shadowed(report: ShadowPages | { readonly compared: 'nothing' }): void {
      made.shadowChecks.add(1, { compared: report.compared });
      if (report.compared === 'nothing') return;
      made.shadowPages.add(report.both, { seen_by: 'both' });
      made.shadowPages.add(report.primaryOnly, { seen_by: 'primary' });
      made.shadowPages.add(report.shadowOnly, { seen_by: 'shadow' });
    },
    verified(report: VerifiedPages | { readonly compared: 'nothing' }): void {
      const compared = report.compared === 'all';
      const outcome = !compared ? 'not-compared' : report.differing > 0 ? 'lost' : 'right';
      made.verifications.add(1, { outcome });
      if (!compared) return;
      made.verifiedPages.add(report.pages);
      made.lostPages.add(report.differing);
    },
    chainCompacted(amounts: { readonly writtenBytes: number }): void {
      made.compactions.add(1);
      made.compactWritten.add(amounts.writtenBytes);
    },
    recovered(what: string): void {
      made.recoveries.add(1, { what });
    },
  };
}

function catalogMetrics(made: Made) {
  const kind = boundedLabel();
  const purposes = boundedLabel();
  return {
    published(seconds: number): void {
      made.publishes.add(1, { outcome: 'published' });
      made.publishSeconds.record(seconds);
    },
    publishFailed(why: string): void {
      made.publishes.add(1, { outcome: kind(why) });
    },
    gcRun(run: Parameters<Metrics['gcRun']>[0]): void {
      made.gcRuns.add(1, { outcome: run.outcome });
      made.gcSeconds.record(run.seconds);
      made.gcCondemned.add(run.condemned);
      made.gcReclaimed.add(run.reclaimed);
      made.gcReclaimedBytes.add(run.reclaimedBytes);
      made.gcTrimmed.add(run.trimmed);
    },
    held(purpose: string): void {
      made.holds.add(1, { purpose: purposes(purpose) });
    },
    released(count: number): void {
      made.releases.add(count);
    },
    httpRequest(request: Parameters<Metrics['httpRequest']>[0]): void {
      const { method, route, status, seconds } = request;
      made.requests.add(1, { method, route, status: String(status) });
      made.requestSeconds.record(seconds, { method, route });
    },
  };
}
