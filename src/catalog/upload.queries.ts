/**
 * Table `upload`: objects that a node said it is about to write, and that nothing published needs
 * yet.
 */
import type { ColumnType } from 'kysely';
import type { ArtifactKind, StoredArtifact } from '../artifact/store.ts';
import type { ArtifactKey, Bytes, Digest, NodeId } from '../units.ts';
import type { Upload } from './catalog.ts';
import { chunks } from './database.ts';
import type { Tx } from './database.ts';

export interface UploadTable {
  readonly artifact_key: ColumnType<ArtifactKey, ArtifactKey, never>;
  readonly kind: ColumnType<ArtifactKind, ArtifactKind, never>;
  readonly digest: ColumnType<Digest, Digest, never>;
  readonly size_bytes: ColumnType<Bytes, Bytes, never>;
  readonly node_id: ColumnType<NodeId, NodeId, never>;
  readonly recorded_at_ms: ColumnType<number, number, never>;
}

interface UploadRow {
  readonly artifact_key: ArtifactKey;
  readonly kind: ArtifactKind;
  readonly digest: Digest;
  readonly size_bytes: Bytes;
  readonly node_id: NodeId;
  readonly recorded_at_ms: number;
}

const toUpload = (row: UploadRow): Upload => ({
  key: row.artifact_key,
  kind: row.kind,
  digest: row.digest,
  sizeBytes: row.size_bytes,
  nodeId: row.node_id,
  recordedAtMs: row.recorded_at_ms,
});

export async function insertUploads(
  tx: Tx,
  nodeId: NodeId,
  artifacts: readonly StoredArtifact[],
): Promise<void> {
  for (const some of chunks(artifacts)) {
    const rows = some.map(({ key, kind, digest, sizeBytes }) => ({
      artifact_key: key,
      kind,
      digest,
      size_bytes: sizeBytes,
      node_id: nodeId,
      recorded_at_ms: tx.nowMs,
    }));
    await tx.db.insertInto('upload').values(rows).execute();
  }
}

/** Takes the intents away and says which there were: whoever gets a key here owns its future. */
export async function takeUploads(tx: Tx, keys: readonly ArtifactKey[]): Promise<Upload[]> {
  const taken: Upload[] = [];
  for (const some of chunks(keys)) {
    const rows = await tx.db
      .deleteFrom('upload')
      .where('artifact_key', 'in', some)
      .returningAll()
      .execute();
    taken.push(...rows.map(toUpload));
  }
  return taken;
}

/** In key order. */
export async function selectUploads(tx: Tx, nodeId: NodeId): Promise<Upload[]> {
  const rows = await tx.db
    .selectFrom('upload')
    .selectAll()
    .where('node_id', '=', nodeId)
    .orderBy('artifact_key')
    .execute();
  return rows.map(toUpload);
}
