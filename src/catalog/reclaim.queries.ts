/**
 * Table `reclaim`: objects that nothing in the catalog needs any more, whose bytes are to be
 * deleted.
 */
import { sql } from 'kysely';
import type { ColumnType } from 'kysely';
import type { ArtifactKind, StoredArtifact } from '../artifact/store.ts';
import type { ArtifactKey, Bytes, Digest } from '../units.ts';
import { chunks } from './database.ts';
import type { Tx } from './database.ts';

export interface ReclaimTable {
  readonly artifact_key: ColumnType<ArtifactKey, ArtifactKey, never>;
  readonly kind: ColumnType<ArtifactKind, ArtifactKind, never>;
  readonly digest: ColumnType<Digest, Digest, never>;
  readonly size_bytes: ColumnType<Bytes, Bytes, never>;
  readonly queued_at_ms: ColumnType<number, number, never>;
  /** Grows with each claim; a delete is valid only under the newest. */
  readonly fence: number;
  readonly claimed_until_ms: number;
  readonly claimed_by: string | null;
}

export async function insertReclaims(tx: Tx, artifacts: readonly StoredArtifact[]): Promise<void> {
  for (const some of chunks(artifacts)) {
    await tx.db
      .insertInto('reclaim')
      .values(
        some.map(({ key, kind, digest, sizeBytes }) => ({
          artifact_key: key,
          kind,
          digest,
          size_bytes: sizeBytes,
          queued_at_ms: tx.nowMs,
          fence: 0,
          claimed_until_ms: 0,
          claimed_by: null,
        })),
      )
      .execute();
  }
}

export interface Claim {
  readonly key: ArtifactKey;
  readonly sizeBytes: Bytes;
  /** Valid while the row still has it. */
  readonly fence: number;
}

/**
 * Takes objects that nobody is deleting, or whose deleter was given up on. Its fence outdates all
 * before.
 */
export async function claimReclaims(
  tx: Tx,
  claimant: string,
  options: { limit: number; untilMs: number },
): Promise<Claim[]> {
  const free = await tx.db
    .selectFrom('reclaim')
    .select('artifact_key')
    .where('claimed_until_ms', '<=', tx.nowMs)
    .orderBy('claimed_until_ms')
    .orderBy('artifact_key')
    .limit(options.limit)
    .$if(tx.rowLocks, (query) => query.forUpdate().skipLocked())
    .execute();
  const claims: Claim[] = [];
  for (const some of chunks(free.map((row) => row.artifact_key))) {
    const rows = await tx.db
      .updateTable('reclaim')
      .set((eb) => ({
        fence: eb('fence', '+', 1),
        claimed_until_ms: options.untilMs,
        claimed_by: claimant,
      }))
      .where('artifact_key', 'in', some)
      .returning(['artifact_key as key', 'size_bytes as sizeBytes', 'fence'])
      .execute();
    claims.push(...rows);
  }
  return claims;
}

export async function isCurrent(tx: Tx, claim: Claim): Promise<boolean> {
  const row = await tx.db
    .selectFrom('reclaim')
    .select('fence')
    .where('artifact_key', '=', claim.key)
    .executeTakeFirst();
  return row?.fence === claim.fence;
}

/** Their bytes are gone. Rows that somebody else claimed meanwhile stay that one's. */
export async function finishReclaims(
  tx: Tx,
  claimant: string,
  keys: readonly ArtifactKey[],
): Promise<void> {
  for (const some of chunks(keys)) {
    await tx.db
      .deleteFrom('reclaim')
      .where('artifact_key', 'in', some)
      .where('claimed_by', '=', claimant)
      .execute();
  }
}

/**
 * Gives up what was claimed and not deleted, so that others need not wait for the claim to run out.
 */
export async function unclaimReclaims(
  tx: Tx,
  claimant: string,
  keys: readonly ArtifactKey[],
): Promise<void> {
  for (const some of chunks(keys)) {
    await tx.db
      .updateTable('reclaim')
      .set({ claimed_until_ms: 0, claimed_by: null })
      .where('artifact_key', 'in', some)
      .where('claimed_by', '=', claimant)
      .execute();
  }
}

export interface Backlog {
  readonly objects: number;
  /** A decimal number: the sum may be beyond what a number holds exactly. */
  readonly bytes: string;
}

/** Sizes are summed in halves, neither of which overflows: SQLite's sum ends at 2^63. */
const HALF = 2 ** 32;

export async function reclaimBacklog(tx: Tx): Promise<Backlog> {
  const row = await tx.db
    .selectFrom('reclaim')
    .select((eb) => [
      eb.fn.countAll<number>().as('objects'),
      sql<string | null>`CAST(SUM(size_bytes / ${sql.lit(HALF)}) AS TEXT)`.as('high'),
      sql<string | null>`CAST(SUM(size_bytes % ${sql.lit(HALF)}) AS TEXT)`.as('low'),
    ])
    .executeTakeFirstOrThrow();
  const sum = BigInt(row.high ?? 0) * BigInt(HALF) + BigInt(row.low ?? 0);
  return { objects: row.objects, bytes: sum.toString() };
}
