/** What the catalog tells the metrics: holds as they are taken and released, and two counts. */
import type { Catalog } from '../catalog/catalog.ts';
import type { Transactions } from '../catalog/database.ts';
import type { OpenCatalog } from '../catalog/open.ts';
import type { CatalogCounts, Metrics } from '../observability/metrics.ts';
import type { NodeId } from '../units.ts';

/** The same catalog, with its holds counted. */
export function countHolds<D extends Transactions>(
  catalog: OpenCatalog<D>,
  metrics: Metrics,
): OpenCatalog<D> {
  return {
    ...catalog,
    publish: async (request) => {
      const published = await catalog.publish(request);
      const taken = published.ok && published.value.held ? request.hold : undefined;
      if (taken !== undefined) metrics.held(taken.purpose);
      return published;
    },
    hold: async (request) => {
      const held = await catalog.hold(request);
      if (held.ok) metrics.held(request.purpose);
      return held;
    },
    release: async (id) => {
      const released = await catalog.release(id);
      if (released.ok) metrics.released(1);
      return released;
    },
    releaseMany: async (ids) => {
      const released = await catalog.releaseMany(ids);
      if (released.ok) metrics.released(ids.length);
      return released;
    },
  };
}

/** Longest that collecting metrics waits for the catalog, milliseconds. */
const PATIENCE_MS = 1000;

/** Asks the catalog for its counts; null where it has no answer in time. */
export async function catalogCounts(
  catalog: Pick<Catalog, 'counts'>,
  nodeId: NodeId,
): Promise<CatalogCounts | null> {
  let timer: NodeJS.Timeout | undefined;
  const late = new Promise<null>((resolve) => {
    timer = setTimeout(() => resolve(null), PATIENCE_MS);
  });
  try {
    const counts = await Promise.race([catalog.counts(nodeId), late]);
    if (counts === null || !counts.ok) return null;
    return { openHolds: counts.value.openHolds, gcBacklog: counts.value.backlog };
  } finally {
    clearTimeout(timer);
  }
}
