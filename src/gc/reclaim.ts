/**
 * Deletes the bytes of queued objects.
 *
 * R1 A delete asks, right before it, whether its claim is still the newest: the claim's number is
 *    its fence.
 * R2 Keys are never reused, so even a delete that slept past its fence hits nothing but its own
 *    object.
 * R3 An object that is not there counts as deleted. A store that cannot say so ends the run.
 */
import { randomUUID } from 'node:crypto';
import type { ArtifactError, ArtifactStore } from '../artifact/store.ts';
import type { Transactions } from '../catalog/database.ts';
import {
  claimReclaims,
  finishReclaims,
  isCurrent,
  unclaimReclaims,
} from '../catalog/reclaim.queries.ts';
import type { Claim } from '../catalog/reclaim.queries.ts';
import { Failure } from '../result.ts';
import type { ArtifactKey } from '../units.ts';

export interface ReclaimConfig {
  readonly batchMax: number;
  /** How long others leave a claim alone. Passing it costs work done twice, never wrong deletes. */
  readonly claimMs: number;
  /** Deletes under way at once. */
  readonly inFlightMax: number;
}

export interface Reclaimed {
  readonly claimed: number;
  readonly objects: number;
  readonly bytes: number;
}

interface Outcome {
  readonly claim: Claim;
  readonly gone: boolean;
}

/**
 * One batch. Throws `Failure<CatalogError | ArtifactError>`; what it had not deleted is free for
 * others again.
 */
export async function reclaimBatch(
  deps: { database: Transactions; store: ArtifactStore },
  config: ReclaimConfig,
  signal: AbortSignal,
): Promise<Reclaimed> {
  const { database } = deps;
  const claimant = randomUUID();
  const claims = await database.write('reclaim-claim', (tx) => {
    const untilMs = tx.nowMs + config.claimMs;
    return claimReclaims(tx, claimant, { limit: config.batchMax, untilMs });
  });
  const gone: Claim[] = [];
  let failure: unknown;
  for (let from = 0; from < claims.length && failure === undefined; from += config.inFlightMax) {
    if (signal.aborted) break;
    const some = claims.slice(from, from + config.inFlightMax);
    const results = await Promise.allSettled(some.map((claim) => deleteOne(deps, claim)));
    for (const result of results) {
      if (result.status === 'rejected') failure ??= result.reason;
      else if (result.value.gone) gone.push(result.value.claim);
    }
  }
  const done = new Set<ArtifactKey>(gone.map(({ key }) => key));
  const left = claims.map(({ key }) => key).filter((key) => !done.has(key));
  await database.write('reclaim-finish', async (tx) => {
    await finishReclaims(tx, claimant, [...done]);
    await unclaimReclaims(tx, claimant, left);
  });
  if (failure !== undefined) throw failure as Error;
  return {
    claimed: claims.length,
    objects: gone.length,
    bytes: gone.reduce((sum, { sizeBytes }) => sum + sizeBytes, 0),
  };
}

async function deleteOne(
  { database, store }: { database: Transactions; store: ArtifactStore },
  claim: Claim,
): Promise<Outcome> {
  const fence = (): Promise<boolean> => database.read('fence', (tx) => isCurrent(tx, claim));
  const result = await store.delete(claim.key, fence);
  if (!result.ok) throw new Failure<ArtifactError>(result.error);
  return { claim, gone: result.value !== 'fenced' };
}
