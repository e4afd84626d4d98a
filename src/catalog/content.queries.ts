/**
 * Tables `content`, `content_head`, `content_artifact`: a fixed description of what a snapshot
 * needs.
 */
import type { ColumnType } from 'kysely';
import type { ArtifactKey, ContentId, LayerUuid } from '../units.ts';
import { toArtifact } from './artifact.queries.ts';
import type { Content, ContentArtifact, ContentHead } from './catalog.ts';
import { chunks } from './database.ts';
import type { Tx } from './database.ts';

export interface ContentTable {
  readonly id: ColumnType<ContentId, ContentId, never>;
  readonly manifest_key: ColumnType<ArtifactKey, ArtifactKey, never>;
  /** sha256 over heads and digests: two contents with one id must have the same. */
  readonly fingerprint: ColumnType<string, string, never>;
  readonly created_at_ms: ColumnType<number, number, never>;
}

export interface ContentHeadTable {
  readonly content_id: ColumnType<ContentId, ContentId, never>;
  readonly role: ColumnType<string, string, never>;
  readonly layer_uuid: ColumnType<LayerUuid, LayerUuid, never>;
}

export interface ContentArtifactTable {
  readonly content_id: ColumnType<ContentId, ContentId, never>;
  readonly name: ColumnType<string, string, never>;
  readonly artifact_key: ColumnType<ArtifactKey, ArtifactKey, never>;
}

export interface NewContent {
  readonly id: ContentId;
  readonly fingerprint: string;
  readonly manifestKey: ArtifactKey;
  readonly heads: readonly ContentHead[];
  readonly artifacts: readonly ContentArtifact[];
}

export async function insertContent(tx: Tx, content: NewContent): Promise<void> {
  await tx.db
    .insertInto('content')
    .values({
      id: content.id,
      manifest_key: content.manifestKey,
      fingerprint: content.fingerprint,
      created_at_ms: tx.nowMs,
    })
    .execute();
  if (content.heads.length > 0) {
    await tx.db
      .insertInto('content_head')
      .values(
        content.heads.map(({ role, layer }) => ({
          content_id: content.id,
          role,
          layer_uuid: layer,
        })),
      )
      .execute();
  }
  if (content.artifacts.length > 0) {
    await tx.db
      .insertInto('content_artifact')
      .values(
        content.artifacts.map(({ name, artifact }) => ({
          content_id: content.id,
          name,
          artifact_key: artifact.key,
        })),
      )
      .execute();
  }
}

/**
 * `key-share`: it cannot be deleted before this transaction ends. `no-key-update`: nor can a claim
 * on it end.
 */
export async function findFingerprint(
  tx: Tx,
  id: ContentId,
  lock?: 'key-share' | 'no-key-update',
): Promise<string | undefined> {
  const row = await tx.db
    .selectFrom('content')
    .select('fingerprint')
    .where('id', '=', id)
    .$if(tx.rowLocks && lock === 'key-share', (query) => query.forKeyShare())
    .$if(tx.rowLocks && lock === 'no-key-update', (query) => query.forNoKeyUpdate())
    .executeTakeFirst();
  return row?.fingerprint;
}

/** Heads by role, artifacts by name. Needs one consistent read. */
export async function findContent(tx: Tx, id: ContentId): Promise<Content | undefined> {
  const manifest = await tx.db
    .selectFrom('content')
    .innerJoin('artifact', 'artifact.key', 'content.manifest_key')
    .select(['artifact.key', 'artifact.kind', 'artifact.digest', 'artifact.size_bytes'])
    .where('content.id', '=', id)
    .executeTakeFirst();
  if (manifest === undefined) return undefined;
  const heads = await tx.db
    .selectFrom('content_head')
    .select(['role', 'layer_uuid as layer'])
    .where('content_id', '=', id)
    .orderBy('role')
    .execute();
  const artifacts = await tx.db
    .selectFrom('content_artifact')
    .innerJoin('artifact', 'artifact.key', 'content_artifact.artifact_key')
    .select([
      'content_artifact.name',
      'artifact.key',
      'artifact.kind',
      'artifact.digest',
      'artifact.size_bytes',
    ])
    .where('content_artifact.content_id', '=', id)
    .orderBy('content_artifact.name')
    .execute();
  return {
    id,
    manifest: toArtifact(manifest),
    heads,
    artifacts: artifacts.map((row) => ({ name: row.name, artifact: toArtifact(row) })),
  };
}

/** Takes the contents away; returns what they needed, which may now be unused. */
export async function deleteContents(
  tx: Tx,
  ids: readonly ContentId[],
): Promise<{ layers: LayerUuid[]; artifacts: ArtifactKey[] }> {
  const layers: LayerUuid[] = [];
  const artifacts: ArtifactKey[] = [];
  for (const some of chunks(ids)) {
    const heads = await tx.db
      .deleteFrom('content_head')
      .where('content_id', 'in', some)
      .returning('layer_uuid')
      .execute();
    const others = await tx.db
      .deleteFrom('content_artifact')
      .where('content_id', 'in', some)
      .returning('artifact_key')
      .execute();
    await tx.db.deleteFrom('content').where('id', 'in', some).execute();
    layers.push(...heads.map((row) => row.layer_uuid));
    artifacts.push(...others.map((row) => row.artifact_key));
  }
  return { layers, artifacts };
}

/** The objects, manifests aside, that the contents need. */
export async function selectArtifactKeys(
  tx: Tx,
  ids: readonly ContentId[],
): Promise<ArtifactKey[]> {
  const keys: ArtifactKey[] = [];
  for (const some of chunks(ids)) {
    const rows = await tx.db
      .selectFrom('content_artifact')
      .select('artifact_key')
      .where('content_id', 'in', some)
      .execute();
    keys.push(...rows.map((row) => row.artifact_key));
  }
  return [...new Set(keys)];
}

/** Those of the objects that some content needs. */
export async function selectSharedKeys(
  tx: Tx,
  keys: readonly ArtifactKey[],
): Promise<Set<ArtifactKey>> {
  const shared = new Set<ArtifactKey>();
  for (const some of chunks(keys)) {
    const rows = await tx.db
      .selectFrom('artifact')
      .select('artifact.key')
      .where('artifact.key', 'in', some)
      .where((eb) =>
        eb.exists(
          eb
            .selectFrom('content_artifact')
            .select('content_artifact.name')
            .whereRef('content_artifact.artifact_key', '=', 'artifact.key'),
        ),
      )
      .execute();
    for (const { key } of rows) shared.add(key);
  }
  return shared;
}
