/**
 * What a GC plan reads. Bounded by garbage: whoever else needs a thing is counted only as far as it
 * matters.
 */
import { sql } from 'kysely';
import type { ArtifactKey, ContentId, LayerUuid } from '../units.ts';
import { isClaimed } from './candidate.queries.ts';
import { chunks } from './database.ts';
import type { Tx } from './database.ts';

export interface ContentFacts {
  readonly id: ContentId;
  readonly claimed: boolean;
  readonly heads: readonly LayerUuid[];
  /** Manifest included. `uses`: how many contents need it, counted to 2. */
  readonly artifacts: readonly {
    readonly key: ArtifactKey;
    readonly sizeBytes: number;
    readonly uses: number;
  }[];
}

export interface LayerFacts {
  readonly uuid: LayerUuid;
  readonly predecessor: LayerUuid | null;
  readonly artifactKey: ArtifactKey;
  readonly sizeBytes: number;
  /** Layers on top, counted to the limit asked for. */
  readonly children: number;
  /** Heads that are this layer, counted to the limit asked for. */
  readonly heads: number;
}

/** A page of candidates, after `after`. */
export async function pageOfContentCandidates(
  tx: Tx,
  after: string,
  limit: number,
): Promise<ContentId[]> {
  const rows = await tx.db
    .selectFrom('candidate_content')
    .select('content_id')
    .where('content_id', '>', after as ContentId)
    .orderBy('content_id')
    .limit(limit)
    .execute();
  return rows.map((row) => row.content_id);
}

export async function pageOfLayerCandidates(
  tx: Tx,
  after: string,
  limit: number,
): Promise<LayerUuid[]> {
  const rows = await tx.db
    .selectFrom('candidate_layer')
    .select('layer_uuid')
    .where('layer_uuid', '>', after as LayerUuid)
    .orderBy('layer_uuid')
    .limit(limit)
    .execute();
  return rows.map((row) => row.layer_uuid);
}

export async function readContentFacts(tx: Tx, ids: readonly ContentId[]): Promise<ContentFacts[]> {
  const facts: ContentFacts[] = [];
  for (const some of chunks(ids)) {
    const contents = await tx.db
      .selectFrom('content')
      .innerJoin('artifact', 'artifact.key', 'content.manifest_key')
      .select((eb) => [
        'content.id',
        'artifact.key',
        'artifact.size_bytes',
        eb
          .case()
          .when(isClaimed(eb))
          .then(sql<number>`1`)
          .else(sql<number>`0`)
          .end()
          .as('claimed'),
      ])
      .where('content.id', 'in', some)
      .execute();
    const heads = await tx.db
      .selectFrom('content_head')
      .select(['content_id', 'layer_uuid'])
      .where('content_id', 'in', some)
      .execute();
    const others = await tx.db
      .selectFrom('content_artifact')
      .innerJoin('artifact', 'artifact.key', 'content_artifact.artifact_key')
      .select([
        'content_artifact.content_id',
        'artifact.key',
        'artifact.size_bytes',
        sql<number>`(SELECT count(*) FROM (SELECT 1 FROM content_artifact other
          WHERE other.artifact_key = artifact.key LIMIT 2) counted)`.as('uses'),
      ])
      .where('content_artifact.content_id', 'in', some)
      .execute();
    const headsOf = groupBy(heads, (row) => row.content_id);
    const othersOf = groupBy(others, (row) => row.content_id);
    for (const { id, key, size_bytes: sizeBytes, claimed } of contents) {
      const rest = (othersOf.get(id) ?? []).map((row) => ({
        key: row.key,
        sizeBytes: row.size_bytes,
        uses: row.uses,
      }));
      facts.push({
        id,
        claimed: claimed === 1,
        heads: (headsOf.get(id) ?? []).map((row) => row.layer_uuid),
        artifacts: [{ key, sizeBytes, uses: 1 }, ...rest],
      });
    }
  }
  return facts;
}

export async function readLayerFacts(
  tx: Tx,
  uuids: readonly LayerUuid[],
  countMax: number,
): Promise<LayerFacts[]> {
  const facts: LayerFacts[] = [];
  for (const some of chunks(uuids)) {
    const rows = await tx.db
      .selectFrom('layer')
      .innerJoin('artifact', 'artifact.key', 'layer.artifact_key')
      .select([
        'layer.uuid',
        'layer.predecessor',
        'layer.artifact_key as artifactKey',
        'artifact.size_bytes as sizeBytes',
        sql<number>`(SELECT count(*) FROM (SELECT 1 FROM layer child
          WHERE child.predecessor = layer.uuid LIMIT ${countMax}) counted)`.as('children'),
        sql<number>`(SELECT count(*) FROM (SELECT 1 FROM content_head head
          WHERE head.layer_uuid = layer.uuid LIMIT ${countMax}) counted)`.as('heads'),
      ])
      .where('layer.uuid', 'in', some)
      .execute();
    facts.push(...rows);
  }
  return facts;
}

/** How many objects the catalog needs, counted to `countMax`. */
export async function countArtifacts(tx: Tx, countMax: number): Promise<number> {
  const { rows } = await sql<{ count: number }>`SELECT count(*) AS count
    FROM (SELECT 1 FROM artifact LIMIT ${countMax}) counted`.execute(tx.db);
  return rows[0]?.count ?? 0;
}

function groupBy<T, K>(all: readonly T[], keyOf: (item: T) => K): ReadonlyMap<K, T[]> {
  const groups = new Map<K, T[]>();
  for (const item of all) {
    const group = groups.get(keyOf(item));
    if (group === undefined) groups.set(keyOf(item), [item]);
    else group.push(item);
  }
  return groups;
}
