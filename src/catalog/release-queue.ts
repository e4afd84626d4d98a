/**
 * Sends releases of holds from the node's durable queue to the catalog, whenever the catalog can be
 * reached. A release leaves the queue only after the catalog has done it, so an outage or a crash
 * delays it and never loses it; doing it twice is harmless.
 */
import type { Clock } from '../clock.ts';
import type { FailureDetail, Result } from '../result.ts';
import type { HoldId } from '../units.ts';
import type { Catalog } from './catalog.ts';

/** What is durable; `NodeDb` has it. */
export interface ReleaseStore {
  pendingReleases(limit: number): readonly { readonly holdId: HoldId }[];
  releaseTried(hold: HoldId): Result<unknown, FailureDetail>;
  releaseDone(hold: HoldId): Result<unknown, FailureDetail>;
}

export interface ReleaseFlusherDeps {
  readonly catalog: Pick<Catalog, 'releaseMany'>;
  readonly store: ReleaseStore;
  readonly clock: Clock;
  /** A batch that failed: it stays queued. */
  readonly onError: (error: FailureDetail) => void;
}

const BATCH_HOLDS = 200;
/** Between looks at the local queue, which needs nobody to say that something was queued. */
const POLL_MS = 1000;
const RETRY_MS_MAX = 30_000;

export class ReleaseFlusher implements AsyncDisposable {
  readonly #deps: ReleaseFlusherDeps;
  readonly #stop = new AbortController();
  #wake: (() => void) | undefined;
  #owed = false;
  #loop: Promise<void> | undefined;

  constructor(deps: ReleaseFlusherDeps) {
    this.#deps = deps;
  }

  /** Begins with what an earlier life of the daemon left. */
  start(): void {
    this.#loop ??= this.#run();
  }

  /** After a release has been queued. Returns at once, and asks nothing of the catalog itself. */
  poke(): void {
    this.#owed = true;
    this.#wake?.();
  }

  /** One pass over the whole queue. Ends at the first batch that fails; true if nothing is left. */
  async flush(): Promise<boolean> {
    const { catalog, store, onError } = this.#deps;
    for (;;) {
      if (this.#stop.signal.aborted) return false;
      const holds = store.pendingReleases(BATCH_HOLDS).map(({ holdId }) => holdId);
      if (holds.length === 0) return true;
      const released = await catalog.releaseMany(holds);
      if (!released.ok) {
        onError(released.error);
        const { kind } = released.error;
        // One id that the catalog will never take must not keep the others from being released.
        if (kind === 'request-invalid' || kind === 'catalog-corrupt') {
          return await this.#oneByOne(holds);
        }
        return false;
      }
      if (!this.#done(holds)) return false;
    }
  }

  async #oneByOne(holds: readonly HoldId[]): Promise<boolean> {
    for (const hold of holds) {
      const released = await this.#deps.catalog.releaseMany([hold]);
      if (released.ok) this.#done([hold]);
      else this.#deps.store.releaseTried(hold);
    }
    return false;
  }

  #done(holds: readonly HoldId[]): boolean {
    for (const hold of holds) {
      const done = this.#deps.store.releaseDone(hold);
      if (!done.ok) {
        this.#deps.onError(done.error);
        return false;
      }
    }
    return true;
  }

  /** Never rejects: what one pass could not do, a later one does. */
  async #run(): Promise<void> {
    let waitMs = POLL_MS;
    const { signal } = this.#stop;
    while (!signal.aborted) {
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
    if (this.#owed || this.#stop.signal.aborted) nap.abort();
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
