/** Sends releases of holds from the node's durable queue to the catalog. */
import type { FailureDetail, Result } from '../result.ts';
import type { HoldId } from '../units.ts';
import type { Catalog } from './catalog.ts';
import { QueueFlusher, type QueueFlusherDeps } from './queue-flusher.ts';

/** What is durable; `NodeDb` has it. */
export interface ReleaseStore {
  pendingReleases(limit: number): readonly { readonly holdId: HoldId }[];
  releaseTried(hold: HoldId): Result<unknown, FailureDetail>;
  releaseDone(hold: HoldId): Result<unknown, FailureDetail>;
}

export interface ReleaseFlusherDeps extends QueueFlusherDeps {
  readonly catalog: Pick<Catalog, 'releaseMany'>;
  readonly store: ReleaseStore;
}

const BATCH_HOLDS = 200;

export class ReleaseFlusher extends QueueFlusher {
  readonly #deps: ReleaseFlusherDeps;

  constructor(deps: ReleaseFlusherDeps) {
    super(deps);
    this.#deps = deps;
  }

  async flush(): Promise<boolean> {
    const { catalog, store, onError } = this.#deps;
    for (;;) {
      if (this.isStopping) return false;
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
}
