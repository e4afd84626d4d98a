/** Table `artifact`: objects of bytes that something published needs. */
import type { ColumnType } from 'kysely';
import type { ArtifactKind, StoredArtifact } from '../artifact/store.ts';
import type { ArtifactKey, Bytes, Digest } from '../units.ts';
import { chunks } from './database.ts';
import type { Tx } from './database.ts';

export interface ArtifactTable {
  readonly key: ColumnType<ArtifactKey, ArtifactKey, never>;
  readonly kind: ColumnType<ArtifactKind, ArtifactKind, never>;
  readonly digest: ColumnType<Digest, Digest, never>;
  readonly size_bytes: ColumnType<Bytes, Bytes, never>;
  readonly created_at_ms: ColumnType<number, number, never>;
}

export interface ArtifactFacts {
  readonly key: ArtifactKey;
  readonly kind: ArtifactKind;
  readonly digest: Digest;
  readonly size_bytes: Bytes;
}

export const toArtifact = (row: ArtifactFacts): StoredArtifact => ({
  key: row.key,
  kind: row.kind,
  digest: row.digest,
  sizeBytes: row.size_bytes,
});

export async function insertArtifacts(tx: Tx, artifacts: readonly StoredArtifact[]): Promise<void> {
  for (const some of chunks(artifacts)) {
    const rows = some.map(({ key, kind, digest, sizeBytes }) => ({
      key,
      kind,
      digest,
      size_bytes: sizeBytes,
      created_at_ms: tx.nowMs,
    }));
    await tx.db.insertInto('artifact').values(rows).execute();
  }
}

/**
 * `lock`: waits for whoever is deleting one of them, and keeps others from doing so. Locked in key
 * order.
 */
export async function findArtifacts(
  tx: Tx,
  keys: readonly ArtifactKey[],
  lock?: 'key-share' | 'update',
): Promise<Map<ArtifactKey, StoredArtifact>> {
  const found = new Map<ArtifactKey, StoredArtifact>();
  for (const some of chunks(keys)) {
    const rows = await tx.db
      .selectFrom('artifact')
      .select(['key', 'kind', 'digest', 'size_bytes'])
      .where('key', 'in', some)
      .orderBy('key')
      .$if(tx.rowLocks && lock === 'key-share', (query) => query.forKeyShare())
      .$if(tx.rowLocks && lock === 'update', (query) => query.forUpdate())
      .execute();
    for (const row of rows) found.set(row.key, toArtifact(row));
  }
  return found;
}

export async function deleteArtifacts(tx: Tx, keys: readonly ArtifactKey[]): Promise<void> {
  for (const some of chunks(keys)) {
    await tx.db.deleteFrom('artifact').where('key', 'in', some).execute();
  }
}
