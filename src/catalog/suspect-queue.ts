/** Sends the marks of suspect layers from the node's durable queue to the catalog. */
import type { FailureDetail, Result } from '../result.ts';
import type { LayerUuid } from '../units.ts';
import type { Catalog } from './catalog.ts';
import { QueueFlusher, type QueueFlusherDeps } from './queue-flusher.ts';

/** What is durable; `NodeDb` has it. */
export interface SuspectStore {
  pendingSuspects(limit: number): readonly { readonly layer: LayerUuid; readonly reason: string }[];
  /** A layer that is still to be published cannot be marked before. */
  isUnpublished(layer: LayerUuid): boolean;
  suspectTried(layer: LayerUuid): Result<unknown, FailureDetail>;
  suspectDone(layer: LayerUuid): Result<unknown, FailureDetail>;
}

export interface SuspectFlusherDeps extends QueueFlusherDeps {
  readonly catalog: Pick<Catalog, 'markSuspects'>;
  readonly store: SuspectStore;
}

const BATCH_LAYERS = 100;

export class SuspectFlusher extends QueueFlusher {
  readonly #deps: SuspectFlusherDeps;

  constructor(deps: SuspectFlusherDeps) {
    super(deps);
    this.#deps = deps;
  }

  async flush(): Promise<boolean> {
    const { store } = this.#deps;
    for (const { layer, reason } of store.pendingSuspects(BATCH_LAYERS)) {
      if (this.isStopping || !(await this.#mark(layer, reason))) return false;
    }
    return store.pendingSuspects(1).length === 0;
  }

  /** False where the catalog could not be asked, or node.db not told. */
  async #mark(layer: LayerUuid, reason: string): Promise<boolean> {
    const { catalog, store, onError } = this.#deps;
    const marked = await catalog.markSuspects({ layers: [layer], reason });
    if (!marked.ok) {
      onError(marked.error);
      store.suspectTried(layer);
      return false;
    }
    const early = marked.value.unknown.length > 0 && store.isUnpublished(layer);
    const told = early ? store.suspectTried(layer) : store.suspectDone(layer);
    if (!told.ok) onError(told.error);
    return told.ok;
  }
}
