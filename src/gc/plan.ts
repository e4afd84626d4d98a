/**
 * What a collection would do, from facts alone: no I/O, so it can be tested, shown and counted
 * beforehand. Its work is proportional to garbage. Execution decides again, under locks: a plan is
 * never an order.
 */
import type { ContentFacts, LayerFacts } from '../catalog/plan.queries.ts';
import type { ArtifactKey, ContentId, LayerUuid } from '../units.ts';

export interface PlannedArtifact {
  readonly key: ArtifactKey;
  readonly sizeBytes: number;
}

export interface GcPlan {
  readonly contents: readonly ContentId[];
  readonly layers: readonly LayerUuid[];
  /** Of the contents and layers above: objects that would be queued for reclaim. */
  readonly artifacts: readonly PlannedArtifact[];
}

/**
 * Feed it candidates, then the layers it asks for until it asks for none.
 * A layer is garbage when all layers above it and all its heads are.
 */
export class GcPlanner {
  readonly #contents = new Set<ContentId>();
  readonly #layers = new Set<LayerUuid>();
  readonly #artifacts = new Map<ArtifactKey, PlannedArtifact>();
  readonly #doomedChildren = new Map<LayerUuid, number>();
  readonly #doomedHeads = new Map<LayerUuid, number>();
  #frontier = new Set<LayerUuid>();

  addContent(content: ContentFacts): void {
    if (content.claimed || this.#contents.has(content.id)) return;
    this.#contents.add(content.id);
    for (const { key, sizeBytes, uses } of content.artifacts) {
      if (uses <= 1) this.#artifacts.set(key, { key, sizeBytes });
    }
    for (const head of content.heads) {
      increment(this.#doomedHeads, head);
      this.#frontier.add(head);
    }
  }

  addLayerCandidate(uuid: LayerUuid): void {
    this.#frontier.add(uuid);
  }

  /** `layer`'s counts must reach at least `countMax()`, or be exact. */
  addLayer(layer: LayerFacts): void {
    const needed =
      layer.children > (this.#doomedChildren.get(layer.uuid) ?? 0) ||
      layer.heads > (this.#doomedHeads.get(layer.uuid) ?? 0);
    if (needed || this.#layers.has(layer.uuid)) return;
    this.#layers.add(layer.uuid);
    const { artifactKey: key, sizeBytes, predecessor } = layer;
    this.#artifacts.set(key, { key, sizeBytes });
    if (predecessor !== null) {
      increment(this.#doomedChildren, predecessor);
      this.#frontier.add(predecessor);
    }
  }

  /** Layers whose facts it needs (again) next; empty when the plan is complete. */
  takeFrontier(): LayerUuid[] {
    const taken = [...this.#frontier];
    this.#frontier = new Set();
    return taken;
  }

  /** Counting who needs one of these further than this changes nothing. */
  countMax(uuids: readonly LayerUuid[]): number {
    const most = (counts: ReadonlyMap<LayerUuid, number>): number =>
      uuids.reduce((max, uuid) => Math.max(max, counts.get(uuid) ?? 0), 0);
    return Math.max(most(this.#doomedChildren), most(this.#doomedHeads)) + 1;
  }

  plan(): GcPlan {
    return {
      contents: [...this.#contents],
      layers: [...this.#layers],
      artifacts: [...this.#artifacts.values()],
    };
  }
}

function increment(counts: Map<LayerUuid, number>, uuid: LayerUuid): void {
  counts.set(uuid, (counts.get(uuid) ?? 0) + 1);
}

export interface MassDeleteGuard {
  /** Share of all objects that one run may take without being forced. */
  readonly shareMax: number;
  /** Always allowed, however few objects there are. */
  readonly objectsMin: number;
}

/** How far all objects must be counted to decide. */
export const countNeeded = (planned: number, guard: MassDeleteGuard): number =>
  guard.shareMax <= 0 ? 1 : Math.ceil(planned / guard.shareMax) + 1;

/** `total` may stop at `countNeeded`. */
export const isMassDelete = (planned: number, total: number, guard: MassDeleteGuard): boolean =>
  planned > guard.objectsMin && planned > total * guard.shareMax;
