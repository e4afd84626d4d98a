/**
 * Online garbage collection: guard, condemn, reclaim, trim. Any number of collectors may run at
 * once, in any number of processes; one that is killed leaves queues that the next one goes on
 * with.
 */
import { randomUUID } from 'node:crypto';
import type { ArtifactError, ArtifactStore } from '../artifact/store.ts';
import type { Transactions, Tx } from '../catalog/database.ts';
import type { CatalogError } from '../catalog/errors.ts';
import { finishRun, insertRun, selectRuns } from '../catalog/gc-run.queries.ts';
import type { GcOutcome, GcRun } from '../catalog/gc-run.queries.ts';
import { reclaimBacklog } from '../catalog/reclaim.queries.ts';
import type { Backlog } from '../catalog/reclaim.queries.ts';
import { trimHolds, trimRuns, trimSnapshots } from '../catalog/trim.queries.ts';
import { Failure, err, ok } from '../result.ts';
import type { FailureDetail, Result } from '../result.ts';
import { condemnContents, condemnLayers } from './condemn.ts';
import type { Condemned } from './condemn.ts';
import { countObjects, loadPlan } from './load-plan.ts';
import { countNeeded, isMassDelete } from './plan.ts';
import type { GcPlan } from './plan.ts';
import { reclaimBatch } from './reclaim.ts';

export interface GcConfig {
  /** Most rows that one transaction condemns or trims, and most objects one claim takes. */
  readonly batchMax: number;
  /** 0 to 1: share of all objects above which a run stops unless forced. */
  readonly massDeleteShare: number;
  /** Number of objects up to which the share does not matter. */
  readonly massDeleteMin: number;
  /** How long closed holds, retired snapshots and reports are kept. */
  readonly retentionMs: number;
  readonly claimMs: number;
  readonly inFlightMax: number;
}

export const gcDefaults: GcConfig = {
  batchMax: 200,
  massDeleteShare: 0.2,
  massDeleteMin: 1000,
  retentionMs: 7 * 24 * 3_600_000,
  claimMs: 5 * 60_000,
  inFlightMax: 8,
};

export interface MassDelete {
  readonly kind: 'mass-delete';
  readonly message: string;
  readonly planned: number;
}

export type GcError =
  | CatalogError
  | ArtifactError
  | MassDelete
  | { readonly kind: 'cancelled'; readonly message: string }
  /** A bug. */
  | { readonly kind: 'internal'; readonly message: string };

export interface GcReport {
  readonly runId: string;
  readonly contentsDeleted: number;
  readonly layersCondemned: number;
  readonly objectsReclaimed: number;
  /** At most 2^53 − 1: what is beyond is not counted. */
  readonly bytesReclaimed: number;
  readonly holdsTrimmed: number;
  readonly snapshotsTrimmed: number;
  readonly durationMs: number;
}

export interface GcPreview extends GcPlan {
  /** Of `artifacts`. */
  readonly bytes: string;
  /** Queued by earlier runs, uploads given up on included. */
  readonly backlog: Backlog;
  /** The guard would stop this run. */
  readonly massDelete: boolean;
}

export interface CollectorDeps {
  readonly database: Transactions;
  readonly store: ArtifactStore;
  /** Who collects, for the report: a node's id, or `cli`. */
  readonly name: string;
}

type Counts = { -readonly [Key in keyof Omit<GcReport, 'runId' | 'durationMs'>]: number };

const noCounts = (): Counts => ({
  contentsDeleted: 0,
  layersCondemned: 0,
  objectsReclaimed: 0,
  bytesReclaimed: 0,
  holdsTrimmed: 0,
  snapshotsTrimmed: 0,
});

export class Collector {
  readonly #deps: CollectorDeps;
  readonly #config: GcConfig;

  constructor(deps: CollectorDeps, config: GcConfig = gcDefaults) {
    this.#deps = deps;
    this.#config = config;
  }

  /** What `run` would do now. Changes nothing. */
  async plan(signal: AbortSignal): Promise<Result<GcPreview, GcError>> {
    return await edge(signal, async () => {
      const { database } = this.#deps;
      const plan = await loadPlan(database, signal);
      const backlog = await database.read('backlog', reclaimBacklog);
      const sum = plan.artifacts.reduce((all, { sizeBytes }) => all + BigInt(sizeBytes), 0n);
      return {
        ...plan,
        bytes: sum.toString(),
        backlog,
        massDelete: await this.#tooMany(plan.artifacts.length),
      };
    });
  }

  /** Until nothing is left, or `signal`. `force`: past the mass-delete guard. */
  async run(
    options: { readonly force?: boolean },
    signal: AbortSignal,
  ): Promise<Result<GcReport, GcError>> {
    const { clock } = this.#deps.database;
    const startNs = clock.monotonicNs();
    const runId = randomUUID();
    const counts = noCounts();
    const result = await edge(signal, async () => {
      await this.#write('gc-start', (tx) =>
        insertRun(tx, { id: runId, collector: this.#deps.name }),
      );
      if (options.force !== true) await this.#guard(signal);
      await this.#condemn(counts, signal);
      await this.#reclaim(counts, signal);
      await this.#trim(counts, signal);
      const durationMs = Number(clock.monotonicNs() - startNs) / 1e6;
      return { runId, ...counts, durationMs };
    });
    await this.#report(runId, counts, result);
    await this.#deps.database.restoreReserve();
    return result;
  }

  /** Newest first. */
  async runs(limit: number): Promise<Result<readonly GcRun[], GcError>> {
    return await edge(new AbortController().signal, () =>
      this.#deps.database.read('gc-runs', (tx) => selectRuns(tx, limit)),
    );
  }

  async #tooMany(planned: number): Promise<boolean> {
    const { massDeleteShare: shareMax, massDeleteMin: objectsMin } = this.#config;
    const guard = { shareMax, objectsMin };
    if (planned <= objectsMin) return false;
    const total = await countObjects(this.#deps.database, countNeeded(planned, guard));
    return isMassDelete(planned, total, guard);
  }

  async #guard(signal: AbortSignal): Promise<void> {
    const planned = (await loadPlan(this.#deps.database, signal)).artifacts.length;
    if (!(await this.#tooMany(planned))) return;
    const share = `${Math.round(this.#config.massDeleteShare * 100)} %`;
    const message =
      `would delete ${planned} objects, more than ${share} of all; ` +
      'look at the plan (--dry-run), then use --force';
    throw new Failure<MassDelete>({ kind: 'mass-delete', message, planned });
  }

  async #condemn(counts: Counts, signal: AbortSignal): Promise<void> {
    const { batchMax } = this.#config;
    const drain = async (
      name: string,
      step: (tx: Tx, limit: number) => Promise<Condemned>,
    ): Promise<number> => {
      for (let deleted = 0; ;) {
        signal.throwIfAborted();
        const done = await this.#write(name, (tx) => step(tx, batchMax));
        if (done.examined === 0) return deleted;
        deleted += done.deleted;
        if (step === condemnContents) counts.contentsDeleted += done.deleted;
        else counts.layersCondemned += done.deleted;
      }
    };
    await drain('condemn-contents', condemnContents);
    await drain('condemn-layers', condemnLayers);
  }

  async #reclaim(counts: Counts, signal: AbortSignal): Promise<void> {
    for (;;) {
      signal.throwIfAborted();
      const batch = await this.#withReserve(() => reclaimBatch(this.#deps, this.#config, signal));
      counts.objectsReclaimed += batch.objects;
      // Recorded as one integer, which has to be read again.
      counts.bytesReclaimed = Math.min(
        counts.bytesReclaimed + batch.bytes,
        Number.MAX_SAFE_INTEGER,
      );
      if (batch.claimed === 0) return;
    }
  }

  async #trim(counts: Counts, signal: AbortSignal): Promise<void> {
    const { batchMax, retentionMs } = this.#config;
    const beforeMs = this.#deps.database.clock.nowMs() - retentionMs;
    const drain = async (
      step: (tx: Tx, beforeMs: number, limit: number) => Promise<number>,
    ): Promise<number> => {
      for (let total = 0; ;) {
        signal.throwIfAborted();
        const trimmed = await this.#write('trim', (tx) => step(tx, beforeMs, batchMax));
        total += trimmed;
        if (trimmed < batchMax) return total;
      }
    };
    counts.holdsTrimmed += await drain(trimHolds);
    counts.snapshotsTrimmed += await drain(trimSnapshots);
    await drain(trimRuns);
  }

  #write<T>(name: string, work: (tx: Tx) => Promise<T>): Promise<T> {
    return this.#withReserve(() => this.#deps.database.write(name, work));
  }

  /** A full disk must not keep away what would empty it. */
  async #withReserve<T>(work: () => Promise<T>): Promise<T> {
    try {
      return await work();
    } catch (error) {
      const detail = error instanceof Failure ? (error.detail as FailureDetail) : undefined;
      const full = detail?.kind === 'catalog-full';
      if (!full || !(await this.#deps.database.freeReserve())) throw error;
      return await work();
    }
  }

  /** The report is for people: failing to write it changes nothing about the run. */
  async #report(runId: string, counts: Counts, result: Result<GcReport, GcError>): Promise<void> {
    const outcome = outcomeOf(result);
    await edge(new AbortController().signal, () =>
      this.#write('gc-finish', (tx) =>
        finishRun(tx, {
          id: runId,
          outcome,
          message: result.ok ? null : result.error.message,
          contentsDeleted: counts.contentsDeleted,
          layersCondemned: counts.layersCondemned,
          artifactsReclaimed: counts.objectsReclaimed,
          bytesReclaimed: counts.bytesReclaimed,
        }),
      ),
    );
  }
}

function outcomeOf(result: Result<GcReport, GcError>): GcOutcome {
  if (result.ok) return 'done';
  return result.error.kind === 'mass-delete' || result.error.kind === 'cancelled'
    ? 'stopped'
    : 'failed';
}

async function edge<T>(signal: AbortSignal, work: () => Promise<T>): Promise<Result<T, GcError>> {
  try {
    return ok(await work());
  } catch (error) {
    if (error instanceof Failure) return err(error.detail as GcError);
    if (signal.aborted) return err({ kind: 'cancelled', message: 'the collection was cancelled' });
    throw error;
  }
}
