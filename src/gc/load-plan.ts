/** Reads what a plan needs, page by page, each in a transaction of its own. */
import type { Transactions } from '../catalog/database.ts';
import {
  countArtifacts,
  pageOfContentCandidates,
  pageOfLayerCandidates,
  readContentFacts,
  readLayerFacts,
} from '../catalog/plan.queries.ts';
import { GcPlanner } from './plan.ts';
import type { GcPlan } from './plan.ts';

const PAGE_ROWS = 500;

/** Throws `Failure<CatalogError>`. */
export async function loadPlan(database: Transactions, signal: AbortSignal): Promise<GcPlan> {
  const planner = new GcPlanner();
  for (let after = ''; ;) {
    signal.throwIfAborted();
    const facts = await database.read('plan-contents', async (tx) =>
      readContentFacts(tx, await pageOfContentCandidates(tx, after, PAGE_ROWS)),
    );
    if (facts.length === 0) break;
    for (const content of facts) {
      planner.addContent(content);
      if (content.id > after) after = content.id;
    }
  }
  for (let after = ''; ;) {
    const uuids = await database.read('plan-layers', (tx) =>
      pageOfLayerCandidates(tx, after, PAGE_ROWS),
    );
    if (uuids.length === 0) break;
    uuids.forEach((uuid) => planner.addLayerCandidate(uuid));
    after = uuids.at(-1) ?? after;
  }
  await followChains(database, planner, signal);
  return planner.plan();
}

async function followChains(
  database: Transactions,
  planner: GcPlanner,
  signal: AbortSignal,
): Promise<void> {
  for (;;) {
    const uuids = planner.takeFrontier();
    if (uuids.length === 0) return;
    for (let from = 0; from < uuids.length; from += PAGE_ROWS) {
      signal.throwIfAborted();
      const page = uuids.slice(from, from + PAGE_ROWS);
      const facts = await database.read('plan-chain', (tx) =>
        readLayerFacts(tx, page, planner.countMax(page)),
      );
      facts.forEach((layer) => planner.addLayer(layer));
    }
  }
}

export const countObjects = (database: Transactions, countMax: number): Promise<number> =>
  database.read('count-objects', (tx) => countArtifacts(tx, countMax));
