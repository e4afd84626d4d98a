/** Table `reclaim`: objects that nothing in the catalog needs any more, whose bytes are to be deleted. */
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
