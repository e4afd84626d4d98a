/** The collector as the daemon runs it: on a schedule, and for the API. Answers are plain data. */
import type { ArtifactStore } from '../artifact/store.ts';
import type { Transactions } from '../catalog/database.ts';
import type { FailureDetail, Result } from '../result.ts';
import { ok } from '../result.ts';
import { Collector, gcDefaults } from './collector.ts';
import type { GcError, GcReport } from './collector.ts';
import { GcSchedule } from './schedule.ts';

/** The `[gc]` section: durations in milliseconds. */
export interface GcSettings {
  readonly interval: number;
  readonly batchMax: number;
  readonly massDeleteShare: number;
  readonly retention: number;
}

export const gcConfigOf = (settings: GcSettings) => ({
  ...gcDefaults,
  batchMax: settings.batchMax,
  massDeleteShare: settings.massDeleteShare,
  retentionMs: settings.retention,
});

export interface GcServiceDeps {
  readonly database: Transactions;
  readonly store: ArtifactStore;
  readonly settings: GcSettings;
  /** Who collects, for reports: the node's id. */
  readonly name: string;
  readonly onRun: (result: Result<GcReport, GcError>) => void;
}

type Plain = Readonly<Record<string, unknown>>;
const NAMES_MAX = 1000;

export class GcService implements AsyncDisposable {
  readonly #collector: Collector;
  readonly #schedule: GcSchedule;

  /** Starts the schedule. */
  constructor({ database, store, settings, name, onRun }: GcServiceDeps) {
    this.#collector = new Collector({ database, store, name }, gcConfigOf(settings));
    this.#schedule = new GcSchedule({ collector: this.#collector, clock: database.clock, onRun });
    this.#schedule.start(settings.interval);
  }

  /** Names at most 1000 of each; counts and bytes are of all. */
  async plan(signal: AbortSignal): Promise<Result<Plain, FailureDetail>> {
    const plan = await this.#collector.plan(signal);
    if (!plan.ok) return plan;
    const { contents, layers, artifacts, bytes, backlog, massDelete } = plan.value;
    return ok({
      contents: contents.length,
      layers: layers.length,
      objects: artifacts.length,
      bytes,
      backlog,
      massDelete,
      contentIds: contents.slice(0, NAMES_MAX),
      layerUuids: layers.slice(0, NAMES_MAX),
      objectKeys: artifacts.slice(0, NAMES_MAX).map(({ key }) => key),
    });
  }

  async run(options: { readonly force: boolean }): Promise<Result<Plain, FailureDetail>> {
    const report = await this.#schedule.runNow(options);
    return report.ok ? ok({ ...report.value }) : report;
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.#schedule[Symbol.asyncDispose]();
  }
}
