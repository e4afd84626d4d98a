/** Table `layer`: one row per sealed layer that something published, or a layer above, needs. */
import { sql } from 'kysely';
import type { ColumnType } from 'kysely';
import type { StoredArtifact } from '../artifact/store.ts';
import { CHAIN_LAYERS_MAX } from '../units.ts';
import type { ArtifactKey, Bytes, LayerUuid } from '../units.ts';
import { findArtifacts, toArtifact } from './artifact.queries.ts';
import type { ArtifactFacts } from './artifact.queries.ts';
import type { Layer } from './catalog.ts';
import { chunks } from './database.ts';
import type { Tx } from './database.ts';

export interface LayerTable {
  readonly uuid: ColumnType<LayerUuid, LayerUuid, never>;
  readonly predecessor: ColumnType<LayerUuid | null, LayerUuid | null, never>;
  readonly artifact_key: ColumnType<ArtifactKey, ArtifactKey, never>;
  readonly virtual_bytes: ColumnType<Bytes, Bytes, never>;
  readonly depth: ColumnType<number, number, never>;
  readonly created_at_ms: ColumnType<number, number, never>;
  /** Set later, by `suspects.ts`; all else never changes. */
  readonly suspect_reason: string | null;
  /** 1: its capture looked at every page. */
  readonly complete: ColumnType<number, number, never>;
}

interface LayerRow extends ArtifactFacts {
  readonly uuid: LayerUuid;
  readonly predecessor: LayerUuid | null;
  readonly virtual_bytes: Bytes;
  readonly depth: number;
  readonly layer_created_at_ms: number;
  readonly suspect_reason: string | null;
  readonly complete: number;
}

const layerOf = (row: Omit<LayerRow, keyof ArtifactFacts>, artifact: StoredArtifact): Layer => ({
  uuid: row.uuid,
  predecessor: row.predecessor,
  virtualBytes: row.virtual_bytes,
  depth: row.depth,
  artifact,
  createdAtMs: row.layer_created_at_ms,
  suspectReason: row.suspect_reason,
  complete: row.complete === 1,
});

const toLayer = (row: LayerRow): Layer => layerOf(row, toArtifact(row));

const layersWithArtifacts = (tx: Tx) =>
  tx.db
    .selectFrom('layer')
    .innerJoin('artifact', 'artifact.key', 'layer.artifact_key')
    .select([
      'layer.uuid',
      'layer.predecessor',
      'layer.virtual_bytes',
      'layer.depth',
      'layer.created_at_ms as layer_created_at_ms',
      'layer.suspect_reason',
      'layer.complete',
      'artifact.key',
      'artifact.kind',
      'artifact.digest',
      'artifact.size_bytes',
    ]);

export async function findLayers(tx: Tx, uuids: readonly LayerUuid[]): Promise<Layer[]> {
  const found: Layer[] = [];
  for (const some of chunks(uuids)) {
    const rows = await layersWithArtifacts(tx).where('layer.uuid', 'in', some).execute();
    found.push(...rows.map(toLayer));
  }
  return found;
}

/** Rows of `depth` carry what the transaction computed: predecessor's depth plus one. */
export async function insertLayers(
  tx: Tx,
  layers: readonly Omit<Layer, 'createdAtMs'>[],
): Promise<void> {
  for (const some of chunks(layers)) {
    const rows = some.map((layer) => ({
      uuid: layer.uuid,
      predecessor: layer.predecessor,
      artifact_key: layer.artifact.key,
      virtual_bytes: layer.virtualBytes,
      depth: layer.depth,
      created_at_ms: tx.nowMs,
      suspect_reason: layer.suspectReason,
      complete: layer.complete ? 1 : 0,
    }));
    await tx.db.insertInto('layer').values(rows).execute();
  }
}

/**
 * From the head down. Ends early only where a predecessor's row is missing, which foreign keys
 * forbid. Two plain steps: joined into one, SQLite may walk all layers there are to find these.
 */
export async function selectChain(tx: Tx, head: LayerUuid): Promise<Layer[]> {
  const columns = [
    'layer.uuid',
    'layer.predecessor',
    'layer.virtual_bytes',
    'layer.depth',
    'layer.created_at_ms as layer_created_at_ms',
    'layer.suspect_reason',
    'layer.complete',
    'layer.artifact_key as key',
  ] as const;
  const rows = await tx.db
    .withRecursive('chain', (db) =>
      db
        .selectFrom('layer')
        .select([...columns, sql<number>`1`.as('step')])
        .where('layer.uuid', '=', head)
        .unionAll(
          db
            .selectFrom('chain')
            .crossJoin('layer')
            .select([...columns, sql<number>`chain.step + 1`.as('step')])
            .whereRef('layer.uuid', '=', 'chain.predecessor')
            .where('chain.step', '<=', CHAIN_LAYERS_MAX),
        ),
    )
    .selectFrom('chain')
    .selectAll()
    .orderBy('step')
    .execute();
  const artifacts = await findArtifacts(
    tx,
    rows.map(({ key }) => key),
  );
  return rows.flatMap((row) => {
    const artifact = artifacts.get(row.key);
    return artifact === undefined ? [] : layerOf(row, artifact);
  });
}

export async function deleteLayers(tx: Tx, uuids: readonly LayerUuid[]): Promise<void> {
  for (const some of chunks(uuids)) {
    await tx.db.deleteFrom('layer').where('uuid', 'in', some).execute();
  }
}
