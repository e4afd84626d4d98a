import type { Database } from 'better-sqlite3';
import { CHAIN_LAYERS_MAX, bytes, digest, layerUuid } from '../units.ts';
import type { Bytes, Digest, LayerUuid } from '../units.ts';
import { refuse } from './failures.ts';
import { all, one, run } from './statements.ts';

/** A layer file on this node. A sealed layer of `src/layer` is one. */
export interface LayerRef {
  readonly uuid: LayerUuid;
  /** The layer it sits on; null for a base. */
  readonly parentUuid: LayerUuid | null;
  readonly path: string;
  readonly digest: Digest;
  /** Size of the file. */
  readonly sizeBytes: Bytes;
  /** Size of the image it is part of. */
  readonly virtualBytes: Bytes;
  /** Guest bytes that it stores. */
  readonly dataBytes?: Bytes;
  /** Its capture looked at every page: with it, the chain reads right whatever lies below. */
  readonly complete?: boolean;
}

export interface LocalLayer extends LayerRef {
  readonly dataBytes: Bytes;
  /** How many layers its chain has, itself included. */
  readonly depth: number;
  /** The file is ours to delete once nothing needs it. */
  readonly managed: boolean;
  /** The catalog has it. */
  readonly published: boolean;
  /** How often its oldest bytes were rewritten by compaction: 0 as captured. */
  readonly generation: number;
  readonly complete: boolean;
}

/** A chain, bottom to top; its head is the last. */
export interface ChainRef {
  readonly head: LayerUuid;
  readonly depth: number;
  readonly layers: readonly LocalLayer[];
}

export type LeaseHolder = 'capture' | 'prepared' | 'compaction' | 'restore';

interface LayerRow {
  readonly uuid: string;
  readonly below_uuid: string | null;
  readonly depth: number;
  readonly path: string;
  readonly digest: string;
  readonly size_bytes: number;
  readonly data_bytes: number;
  readonly virtual_bytes: number;
  readonly managed: number;
  readonly published: number;
  readonly generation: number;
  readonly complete: number;
}

const toLayer = (row: LayerRow): LocalLayer => ({
  uuid: layerUuid(row.uuid),
  parentUuid: row.below_uuid === null ? null : layerUuid(row.below_uuid),
  path: row.path,
  digest: digest(row.digest),
  sizeBytes: bytes(row.size_bytes),
  dataBytes: bytes(row.data_bytes),
  virtualBytes: bytes(row.virtual_bytes),
  depth: row.depth,
  managed: row.managed === 1,
  published: row.published === 1,
  generation: row.generation,
  complete: row.complete === 1,
});

const columns =
  'uuid, below_uuid, depth, path, digest, size_bytes, data_bytes, virtual_bytes, managed, ' +
  'published, generation, complete';

/** A layer that is known and not being deleted. */
export function findLayer(db: Database, uuid: LayerUuid): LocalLayer | undefined {
  const sql = `SELECT ${columns} FROM local_layer WHERE uuid = ? AND condemned_at_ms IS NULL`;
  const row = one<LayerRow>(db, sql, uuid);
  return row === undefined ? undefined : toLayer(row);
}

export function listLayers(db: Database): LocalLayer[] {
  const sql = `SELECT ${columns} FROM local_layer WHERE condemned_at_ms IS NULL
    ORDER BY depth, uuid`;
  return all<LayerRow>(db, sql).map(toLayer);
}

const walk = `WITH RECURSIVE chain(uuid) AS (
  SELECT ?
  UNION ALL
  SELECT l.below_uuid FROM local_layer l JOIN chain c ON l.uuid = c.uuid
  WHERE l.below_uuid IS NOT NULL
)`;

/** The whole chain under a head. */
export function chainOf(db: Database, head: LayerUuid | null): ChainRef | null {
  if (head === null) return null;
  const sql = `${walk} SELECT ${columns} FROM local_layer WHERE uuid IN (SELECT uuid FROM chain)
    ORDER BY depth`;
  const layers = all<LayerRow>(db, sql, head).map(toLayer);
  return { head, depth: layers.length, layers };
}

/** Layers at or below `head` that the catalog does not have yet, predecessors first. */
export function unpublishedLayers(db: Database, head: LayerUuid): LocalLayer[] {
  return chainOf(db, head)?.layers.filter((layer) => !layer.published) ?? [];
}

export function markPublished(db: Database, head: LayerUuid): void {
  const sql = `${walk} UPDATE local_layer SET published = 1
    WHERE published = 0 AND uuid IN (SELECT uuid FROM chain)`;
  run(db, sql, head);
}

/** The catalog has them no more: a publish on top of them must bring them again. */
export function markUnpublished(db: Database, uuids: readonly LayerUuid[]): void {
  for (const uuid of uuids) run(db, 'UPDATE local_layer SET published = 0 WHERE uuid = ?', uuid);
}

export interface LayerFlags {
  readonly managed: boolean;
  readonly published: boolean;
  /** Default 0. */
  readonly generation?: number;
  /** The epoch it was captured as; absent for one that was fetched or merged. */
  readonly epoch?: number;
}

/**
 * Adds a layer on top of `layer.parentUuid`; one that is known already must be the same one. One that
 * is condemned comes back with the file that it has now: its old file goes, its row stays.
 */
export function addLayer(
  db: Database,
  layer: LayerRef,
  below: LayerUuid | null,
  flags: LayerFlags,
): void {
  const known = findLayer(db, layer.uuid);
  if (known !== undefined) {
    if (known.digest === layer.digest && known.parentUuid === below) return;
    refuse({
      kind: 'layer-mismatch',
      message:
        `layer ${layer.uuid} is known with digest ${known.digest} on ${String(known.parentUuid)}; ` +
        `refused with digest ${layer.digest} on ${String(below)}`,
    });
  }
  const parent = below === null ? undefined : findLayer(db, below);
  if (below !== null && parent === undefined) {
    refuse({ kind: 'layer-unknown', message: `layer ${layer.uuid} sits on unknown ${below}` });
  }
  const depth = (parent?.depth ?? 0) + 1;
  if (depth > CHAIN_LAYERS_MAX) refuseDepth(layer.uuid, depth);
  const pathOwner = one<{ uuid: string }>(
    db,
    `SELECT uuid FROM local_layer WHERE path = ?
      OR (uuid = ? AND (digest <> ? OR below_uuid IS NOT ?))`,
    layer.path,
    layer.uuid,
    layer.digest,
    below,
  );
  if (pathOwner !== undefined) {
    refuse({
      kind: 'layer-mismatch',
      message: `layer ${layer.uuid} at ${layer.path}: taken by layer ${pathOwner.uuid}`,
    });
  }
  run(
    db,
    `INSERT INTO local_layer (${columns}, epoch) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
      ON CONFLICT (uuid) DO UPDATE SET path = excluded.path, size_bytes = excluded.size_bytes,
        data_bytes = excluded.data_bytes, virtual_bytes = excluded.virtual_bytes,
        managed = excluded.managed, published = excluded.published,
        generation = excluded.generation, complete = excluded.complete, condemned_at_ms = NULL`,
    layer.uuid,
    below,
    depth,
    layer.path,
    layer.digest,
    layer.sizeBytes,
    layer.dataBytes ?? 0,
    layer.virtualBytes,
    flags.managed ? 1 : 0,
    flags.published ? 1 : 0,
    flags.generation ?? 0,
    layer.complete === true ? 1 : 0,
    flags.epoch ?? null,
  );
}

/** The epochs of layers that were captured on this node and are still here as captured. */
export function epochsOf(db: Database, uuids: readonly LayerUuid[]): Map<LayerUuid, number> {
  const sql = 'SELECT epoch FROM local_layer WHERE uuid = ? AND epoch IS NOT NULL';
  const found = new Map<LayerUuid, number>();
  for (const uuid of uuids) {
    const row = one<{ epoch: number }>(db, sql, uuid);
    if (row !== undefined) found.set(uuid, row.epoch);
  }
  return found;
}

export function refuseDepth(what: string, depth: number): never {
  refuse({
    kind: 'chain-too-deep',
    message: `${what}: a chain of ${depth} layers passes the limit of ${CHAIN_LAYERS_MAX}`,
    depth,
  });
}

/** Adds a chain bottom to top, each layer on the one before it; returns its head. */
export function addChain(
  db: Database,
  layers: readonly LayerRef[],
  flags: LayerFlags,
): LayerUuid | null {
  let below: LayerUuid | null = null;
  for (const layer of layers) {
    if (layer.parentUuid !== null && layer.parentUuid !== below) {
      refuse({
        kind: 'layer-mismatch',
        message: `layer ${layer.uuid} names ${layer.parentUuid} below it, not ${String(below)}`,
      });
    }
    addLayer(db, layer, below, flags);
    below = layer.uuid;
  }
  return below;
}

export function takeLease(
  db: Database,
  holder: LeaseHolder,
  holderId: string,
  head: LayerUuid,
  nowMs: number,
): void {
  if (findLayer(db, head) === undefined) {
    refuse({ kind: 'layer-unknown', message: `layer ${head} is not on this node` });
  }
  const sql = `INSERT OR IGNORE INTO lease (holder_kind, holder_id, layer_uuid, created_at_ms)
    VALUES (?, ?, ?, ?)`;
  run(db, sql, holder, holderId, head, nowMs);
}

/** Every lease of the holder; how many there were. */
export function dropLeases(db: Database, holder: LeaseHolder, holderId: string): number {
  return run(db, 'DELETE FROM lease WHERE holder_kind = ? AND holder_id = ?', holder, holderId);
}

export interface Lease {
  readonly holder: LeaseHolder;
  readonly holderId: string;
  readonly layer: LayerUuid;
}

export function listLeases(db: Database): Lease[] {
  const sql = `SELECT holder_kind AS holder, holder_id AS holderId, layer_uuid AS layer FROM lease
    ORDER BY created_at_ms, holder_kind, holder_id, layer_uuid`;
  return all<Lease>(db, sql);
}

export interface CondemnedLayer {
  readonly uuid: LayerUuid;
  /** Null where the file is not ours: only the row goes. */
  readonly unlink: string | null;
}

/** Marks every layer that nothing needs, top down; from now on no one can take them up. */
export function condemnLayers(db: Database, nowMs: number): void {
  const sql = `UPDATE local_layer SET condemned_at_ms = ? WHERE condemned_at_ms IS NULL
    AND NOT EXISTS (SELECT 1 FROM local_layer a
      WHERE a.below_uuid = local_layer.uuid AND a.condemned_at_ms IS NULL)
    AND NOT EXISTS (SELECT 1 FROM lease WHERE layer_uuid = local_layer.uuid)
    AND NOT EXISTS (SELECT 1 FROM vm WHERE launch_head = local_layer.uuid)
    AND NOT EXISTS (SELECT 1 FROM vm WHERE memory_head = local_layer.uuid)`;
  while (run(db, sql, nowMs) > 0);
}

export function condemnedLayers(db: Database): CondemnedLayer[] {
  const sql = `SELECT uuid, CASE managed WHEN 1 THEN path END AS unlink FROM local_layer
    WHERE condemned_at_ms IS NOT NULL ORDER BY depth DESC`;
  return all<CondemnedLayer>(db, sql);
}

/**
 * Forgets condemned layers whose files are gone, given top down. One that a layer still sits on stays
 * condemned: the file of that layer could not be removed yet.
 */
export function forgetLayers(db: Database, uuids: readonly LayerUuid[]): void {
  const sql = `DELETE FROM local_layer WHERE uuid = ? AND condemned_at_ms IS NOT NULL
    AND NOT EXISTS (SELECT 1 FROM local_layer a WHERE a.below_uuid = local_layer.uuid)`;
  for (const uuid of uuids) run(db, sql, uuid);
}
