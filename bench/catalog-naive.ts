/**
 * The opponent: a catalog that stores every snapshot-to-layer pair. Publishing writes a row per
 * layer of the chain; resolving reads them without recursion. Objects, layers and snapshots are the
 * same tables as ours.
 */
import { sql } from 'kysely';
import type { Database, Tx } from '../src/catalog/database.ts';
import { digestOf, uuidOf } from './catalog-load.ts';

export async function createNaive(database: Database): Promise<void> {
  const { text, int8, suffix } = database.port.columnTypes;
  await database.write('naive', async (tx) => {
    await sql
      .raw(
        `CREATE TABLE naive_pair (
          snapshot_id ${text} NOT NULL REFERENCES snapshot (id),
          position ${int8} NOT NULL,
          layer_uuid ${text} NOT NULL REFERENCES layer (uuid),
          PRIMARY KEY (snapshot_id, position)
        )${suffix}`,
      )
      .execute(tx.db);
    await sql`CREATE INDEX naive_pair_layer ON naive_pair (layer_uuid)`.execute(tx.db);
  });
}

/** One snapshot with one new layer on top of `base`'s chain. Returns its id. */
export async function naivePublish(
  database: Database,
  random: () => number,
  base: string,
  node: string,
): Promise<string> {
  return await database.write('naive-publish', async (tx) => {
    const keys = ['layer', 'manifest', 'vm-state'].map((kind) => {
      const digest = digestOf(random);
      return { key: `${kind}/${digest.slice(7)}/${uuidOf(random)}`, kind, digest };
    });
    const rows = keys.map(({ key, kind, digest }) => sql`(${key}, ${kind}, ${digest}, 1048576, 1)`);
    await sql`INSERT INTO artifact VALUES ${sql.join(rows)}`.execute(tx.db);
    const chain = await pairsOf(tx, base);
    const [uuid, content, snapshot] = [uuidOf(random), uuidOf(random), uuidOf(random)];
    const below = chain.at(-1) ?? null;
    await sql`INSERT INTO layer VALUES (${uuid}, ${below}, ${keys[0]?.key}, 1073741824,
      ${chain.length + 1}, 1, null, 0)`.execute(tx.db);
    await sql`INSERT INTO content VALUES (${content}, ${keys[1]?.key}, ${uuid}, 1)`.execute(tx.db);
    const state = keys[2]?.key;
    await sql`INSERT INTO content_artifact VALUES (${content}, 'vm-state', ${state})`.execute(
      tx.db,
    );
    await sql`INSERT INTO snapshot VALUES
      (${snapshot}, ${content}, ${content}, 'vm-1', ${node}, 1, null, null, null)`.execute(tx.db);
    const pairs = [...chain, uuid].map((layer, at) => sql`(${snapshot}, ${at}, ${layer})`);
    await sql`INSERT INTO naive_pair VALUES ${sql.join(pairs)}`.execute(tx.db);
    return snapshot;
  });
}

/** A snapshot with its objects and its whole chain, in one read. Returns the chain's length. */
export async function naiveResolve(database: Database, snapshot: string): Promise<number> {
  return await database.read('naive-resolve', async (tx) => {
    const content = await sql<{ id: string }>`SELECT c.id, a.key, a.digest, a.size_bytes
      FROM snapshot s JOIN content c ON c.id = s.content_id
      JOIN artifact a ON a.key = c.manifest_key
      WHERE s.id = ${snapshot}`.execute(tx.db);
    await sql`SELECT x.name, a.key, a.digest, a.size_bytes FROM content_artifact x
      JOIN artifact a ON a.key = x.artifact_key
      WHERE x.content_id = ${content.rows[0]?.id}`.execute(tx.db);
    const chain = await sql`SELECT l.uuid, l.virtual_bytes, a.key, a.digest, a.size_bytes
      FROM naive_pair p JOIN layer l ON l.uuid = p.layer_uuid
      JOIN artifact a ON a.key = l.artifact_key
      WHERE p.snapshot_id = ${snapshot} ORDER BY p.position`.execute(tx.db);
    return chain.rows.length;
  });
}

/**
 * Retires snapshots, and forgets each layer whose last pair goes with them. Objects are queued for
 * reclaim as ours are. Returns how many layers went.
 */
export async function naiveCollect(
  database: Database,
  snapshots: readonly string[],
): Promise<number> {
  return await database.write('naive-collect', async (tx) => {
    const ids = sql.join(snapshots);
    const contents = await sql<{ id: string; manifest_key: string; artifact_key: string }>`
      SELECT c.id, c.manifest_key, x.artifact_key FROM snapshot s
      JOIN content c ON c.id = s.content_id JOIN content_artifact x ON x.content_id = c.id
      WHERE s.id IN (${ids})`.execute(tx.db);
    const pairs = await sql<{ layer_uuid: string }>`SELECT DISTINCT layer_uuid FROM naive_pair
      WHERE snapshot_id IN (${ids})`.execute(tx.db);
    await sql`DELETE FROM naive_pair WHERE snapshot_id IN (${ids})`.execute(tx.db);
    await sql`UPDATE snapshot SET content_id = NULL, retired_at_ms = 1
      WHERE id IN (${ids})`.execute(tx.db);
    const gone = sql.join(contents.rows.map((row) => row.id));
    await sql`DELETE FROM content_artifact WHERE content_id IN (${gone})`.execute(tx.db);
    await sql`DELETE FROM content WHERE id IN (${gone})`.execute(tx.db);
    const candidates = sql.join(pairs.rows.map((row) => row.layer_uuid));
    const unneeded = await sql<{ uuid: string; artifact_key: string }>`
      SELECT uuid, artifact_key FROM layer l WHERE uuid IN (${candidates})
      AND NOT EXISTS (SELECT 1 FROM naive_pair p WHERE p.layer_uuid = l.uuid)`.execute(tx.db);
    const uuids = sql.join(unneeded.rows.map((row) => row.uuid));
    await sql`DELETE FROM layer WHERE uuid IN (${uuids})`.execute(tx.db);
    const keys = sql.join([
      ...contents.rows.flatMap((row) => [row.manifest_key, row.artifact_key]),
      ...unneeded.rows.map((row) => row.artifact_key),
    ]);
    await sql`INSERT INTO reclaim SELECT key, kind, digest, size_bytes, 1, 0, 0, NULL
      FROM artifact WHERE key IN (${keys})`.execute(tx.db);
    await sql`DELETE FROM artifact WHERE key IN (${keys})`.execute(tx.db);
    return unneeded.rows.length;
  });
}

async function pairsOf(tx: Tx, snapshot: string): Promise<string[]> {
  const { rows } = await sql<{ layer_uuid: string }>`SELECT layer_uuid FROM naive_pair
    WHERE snapshot_id = ${snapshot} ORDER BY position`.execute(tx.db);
  return rows.map((row) => row.layer_uuid);
}
