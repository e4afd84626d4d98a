/**
 * Runs the collector from time to time. One run at a time; one asked for while another goes joins
 * it.
 */
import type { Clock } from '../clock.ts';
import { err } from '../result.ts';
import type { Result } from '../result.ts';
import type { Collector, GcError, GcReport } from './collector.ts';

export interface GcScheduleDeps {
  readonly collector: Pick<Collector, 'run'>;
  readonly clock: Clock;
  /** After each run, scheduled or not. */
  readonly onRun: (result: Result<GcReport, GcError>) => void;
}

export class GcSchedule implements AsyncDisposable {
  readonly #deps: GcScheduleDeps;
  readonly #stop = new AbortController();
  #running: Promise<Result<GcReport, GcError>> | undefined;
  #loop: Promise<void> = Promise.resolve();

  constructor(deps: GcScheduleDeps) {
    this.#deps = deps;
  }

  /**
   * `intervalMs` 0: only on demand. The first run is one interval from now, shortened by up to
   * half.
   */
  start(intervalMs: number, random: () => number = Math.random): void {
    if (intervalMs > 0) this.#loop = this.#run(intervalMs, intervalMs * (1 - random() / 2));
  }

  /** A run goes on when its caller stops waiting. A forced one never joins one that is not. */
  async runNow(options: { readonly force?: boolean } = {}): Promise<Result<GcReport, GcError>> {
    if (options.force === true) await this.#running;
    this.#running ??= this.#deps.collector.run(options, this.#stop.signal).finally(() => {
      this.#running = undefined;
    });
    const result = await this.#running;
    this.#deps.onRun(result);
    return result;
  }

  /** Never rejects: the next run comes in its time. */
  async #run(intervalMs: number, firstMs: number): Promise<void> {
    for (let waitMs = firstMs; ; waitMs = intervalMs) {
      try {
        await this.#deps.clock.sleep(waitMs, this.#stop.signal);
      } catch {
        return;
      }
      await this.runNow().catch((error: unknown) => {
        this.#deps.onRun(err({ kind: 'internal', message: String(error) }));
      });
    }
  }

  /** Stops a run between two of its transactions. */
  async [Symbol.asyncDispose](): Promise<void> {
    this.#stop.abort();
    await Promise.allSettled([this.#running]);
    await this.#loop;
  }
}
