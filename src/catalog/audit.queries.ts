/** What fsck asks of the catalog: every rule again, from scratch, without trusting foreign keys. */
import { sql } from 'kysely';
import type { ArtifactKind } from '../artifact/store.ts';
import type { ArtifactKey, Bytes, ContentId, Digest, LayerUuid } from '../units.ts';
import { isClaimed, isNeeded } from './candidate.queries.ts';
import { chunks } from './database.ts';
import type { Tx } from './database.ts';

/** Where a row must exist: each referring column, and what it refers to. */
const references = [
  ['layer', 'predecessor', 'layer', 'uuid'],
  ['layer', 'artifact_key', 'artifact', 'key'],
  ['content', 'manifest_key', 'artifact', 'key'],
  ['content_head', 'content_id', 'content', 'id'],
  ['content_head', 'layer_uuid', 'layer', 'uuid'],
  ['content_artifact', 'content_id', 'content', 'id'],
  ['content_artifact', 'artifact_key', 'artifact', 'key'],
  ['snapshot', 'content_id', 'content', 'id'],
  ['snapshot', 'node_id', 'node', 'id'],
  ['alias', 'snapshot_id', 'snapshot', 'id'],
  ['hold', 'content_id', 'content', 'id'],
  ['hold', 'node_id', 'node', 'id'],
  ['volume', 'content_id', 'content', 'id'],
  ['upload', 'node_id', 'node', 'id'],
  ['candidate_content', 'content_id', 'content', 'id'],
  ['candidate_layer', 'layer_uuid', 'layer', 'uuid'],
] as const;

export interface Dangling {
  /** `layer.predecessor`, … */
  readonly column: string;
  /** What is missing. */
  readonly value: string;
}

/** At most `limit` per column. */
export async function selectDangling(tx: Tx, limit: number): Promise<Dangling[]> {
  const found: Dangling[] = [];
  for (const [table, column, target, key] of references) {
    const { rows } = await sql<{ value: string }>`
      SELECT DISTINCT ${sql.ref(`source.${column}`)} AS value FROM ${sql.table(table)} source
      WHERE ${sql.ref(`source.${column}`)} IS NOT NULL AND NOT EXISTS (
        SELECT 1 FROM ${sql.table(target)} target
        WHERE ${sql.ref(`target.${key}`)} = ${sql.ref(`source.${column}`)})
      LIMIT ${limit}`.execute(tx.db);
    found.push(...rows.map(({ value }) => ({ column: `${table}.${column}`, value })));
  }
  return found;
}

/** Layers whose depth is not their predecessor's plus one: a cycle has at least one. */
export async function selectWrongDepths(tx: Tx, limit: number): Promise<LayerUuid[]> {
  const rows = await tx.db
    .selectFrom('layer')
    .innerJoin('layer as below', 'below.uuid', 'layer.predecessor')
    .select('layer.uuid')
    .whereRef('layer.depth', '<>', sql<number>`below.depth + 1`)
    .limit(limit)
    .execute();
  return rows.map((row) => row.uuid);
}

/** Contents that nothing claims and that no collector will look at. */
export async function selectLeakedContents(tx: Tx, limit: number): Promise<ContentId[]> {
  const rows = await tx.db
    .selectFrom('content')
    .select('content.id')
    .where((eb) => eb.not(isClaimed(eb)))
    .where('content.id', 'not in', tx.db.selectFrom('candidate_content').select('content_id'))
    .limit(limit)
    .execute();
  return rows.map((row) => row.id);
}

/** Layers that nothing needs and that no collector will look at. */
export async function selectLeakedLayers(tx: Tx, limit: number): Promise<LayerUuid[]> {
  const rows = await tx.db
    .selectFrom('layer')
    .select('layer.uuid')
    .where((eb) => eb.not(isNeeded(eb)))
    .where('layer.uuid', 'not in', tx.db.selectFrom('candidate_layer').select('layer_uuid'))
    .limit(limit)
    .execute();
  return rows.map((row) => row.uuid);
}

/** Objects that neither a layer nor a content has. */
export async function selectLeakedArtifacts(tx: Tx, limit: number): Promise<ArtifactKey[]> {
  const { rows } = await sql<{ key: ArtifactKey }>`
    SELECT key FROM artifact
    WHERE NOT EXISTS (SELECT 1 FROM layer WHERE layer.artifact_key = artifact.key)
      AND NOT EXISTS (SELECT 1 FROM content WHERE content.manifest_key = artifact.key)
      AND NOT EXISTS
        (SELECT 1 FROM content_artifact WHERE content_artifact.artifact_key = artifact.key)
    LIMIT ${limit}`.execute(tx.db);
  return rows.map((row) => row.key);
}

/** A key that is needed and on its way out at once: invariant C3 is broken. */
export async function selectTornKeys(tx: Tx, limit: number): Promise<ArtifactKey[]> {
  const { rows } = await sql<{ key: ArtifactKey }>`
    SELECT artifact.key AS key FROM artifact
    WHERE EXISTS (SELECT 1 FROM reclaim WHERE reclaim.artifact_key = artifact.key)
      OR EXISTS (SELECT 1 FROM upload WHERE upload.artifact_key = artifact.key)
    LIMIT ${limit}`.execute(tx.db);
  return rows.map((row) => row.key);
}

export interface AuditedObject {
  readonly key: ArtifactKey;
  readonly kind: ArtifactKind;
  readonly digest: Digest;
  readonly sizeBytes: Bytes;
  /** The layer that has it, if one does. */
  readonly layerUuid: LayerUuid | null;
  readonly predecessor: LayerUuid | null;
  readonly virtualBytes: Bytes | null;
}

/** Needed objects in key order, after `after`. */
export async function pageOfObjects(
  tx: Tx,
  after: string,
  limit: number,
): Promise<AuditedObject[]> {
  return await tx.db
    .selectFrom('artifact')
    .leftJoin('layer', 'layer.artifact_key', 'artifact.key')
    .select([
      'artifact.key',
      'artifact.kind',
      'artifact.digest',
      'artifact.size_bytes as sizeBytes',
      'layer.uuid as layerUuid',
      'layer.predecessor',
      'layer.virtual_bytes as virtualBytes',
    ])
    .where('artifact.key', '>', after as ArtifactKey)
    .orderBy('artifact.key')
    .limit(limit)
    .execute();
}

/** Those of the keys that the catalog knows, whatever as. */
export async function selectKnownKeys(
  tx: Tx,
  keys: readonly ArtifactKey[],
): Promise<Set<ArtifactKey>> {
  const known = new Set<ArtifactKey>();
  for (const some of chunks(keys)) {
    const needed = await tx.db
      .selectFrom('artifact')
      .select('key')
      .where('key', 'in', some)
      .execute();
    const uploads = await tx.db
      .selectFrom('upload')
      .select('artifact_key as key')
      .where('artifact_key', 'in', some)
      .execute();
    const reclaims = await tx.db
      .selectFrom('reclaim')
      .select('artifact_key as key')
      .where('artifact_key', 'in', some)
      .execute();
    for (const { key } of [...needed, ...uploads, ...reclaims]) known.add(key);
  }
  return known;
}
