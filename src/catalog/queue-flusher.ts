/**
 * Sends what a durable queue of this node owes the catalog, whenever the catalog can be reached. An
 * entry leaves its queue only after the catalog has done it, so an outage or a crash delays it and
 * never loses it; doing it twice is harmless.
 */
import type { Clock } from '../clock.ts';
import type { FailureDetail } from '../result.ts';

export interface QueueFlusherDeps {
  readonly clock: Clock;
  /** A batch that failed: it stays queued. */
  readonly onError: (error: FailureDetail) => void;
}

/** Between looks at the local queue, which needs nobody to say that something was queued. */
const POLL_MS = 1000;
const RETRY_MS_MAX = 30_000;

export abstract class QueueFlusher implements AsyncDisposable {
  readonly #deps: QueueFlusherDeps;
  readonly #stop = new AbortController();
  #wake: (() => void) | undefined;
  #owed = false;
  #loop: Promise<void> | undefined;

  constructor(deps: QueueFlusherDeps) {
    this.#deps = deps;
  }

  /** One pass over the whole queue. Ends at the first batch that fails; true if nothing is left. */
  abstract flush(): Promise<boolean>;

  /** A pass ends at its next batch. */
  protected get isStopping(): boolean {
    return this.#stop.signal.aborted;
  }

  /** Begins with what an earlier process of the daemon left. */
  start(): void {
    this.#loop ??= this.#run();
  }

  /** After something has been queued. Returns at once, and asks nothing of the catalog itself. */
  poke(): void {
    this.#owed = true;
    this.#wake?.();
  }

  /** Never rejects: what one pass could not do, a later one does. */
  async #run(): Promise<void> {
    let waitMs = POLL_MS;
    while (!this.isStopping) {
      if (await this.flush().catch((error: unknown) => this.#bug(error))) waitMs = POLL_MS;
      else waitMs = Math.min(waitMs * 2, RETRY_MS_MAX);
      await this.#rest(waitMs);
    }
  }

  #bug(error: unknown): false {
    this.#deps.onError({ kind: 'internal', message: String(error) });
    return false;
  }

  /** Until poked, and no longer than `ms`: asking the local queue costs the catalog nothing. */
  async #rest(ms: number): Promise<void> {
    // Not `AbortSignal.any`: on Node 20 a signal that lives long keeps something of every one made.
    const nap = new AbortController();
    this.#wake = () => nap.abort();
    if (this.#owed || this.isStopping) nap.abort();
    this.#owed = false;
    await this.#deps.clock.sleep(ms, nap.signal).catch(() => undefined);
    this.#wake = undefined;
  }

  /** Ends after the batch under way; the rest stays queued. */
  async [Symbol.asyncDispose](): Promise<void> {
    this.#stop.abort();
    this.#wake?.();
    await this.#loop;
  }
}
