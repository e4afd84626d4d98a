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

/** One snapshot with one new layer on top of `base`'s chain. */
export async function naivePublish(
  database: Database,
  random: () => number,
  base: string,
  node: string,
): Promise<void> {
  await database.write('naive-publish', async (tx) => {
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
      ${chain.length + 1}, 1)`.execute(tx.db);
    await sql`INSERT INTO content VALUES (${content}, ${keys[1]?.key}, ${uuid}, 1)`.execute(tx.db);
    const state = keys[2]?.key;
    await sql`INSERT INTO content_artifact VALUES (${content}, 'vm-state', ${state})`.execute(
      tx.db,
    );
    await sql`INSERT INTO snapshot VALUES
      (${snapshot}, ${content}, ${content}, 'vm-1', ${node}, 1, null, null)`.execute(tx.db);
    const pairs = [...chain, uuid].map((layer, at) => sql`(${snapshot}, ${at}, ${layer})`);
    await sql`INSERT INTO naive_pair VALUES ${sql.join(pairs)}`.execute(tx.db);
  });
}

async function pairsOf(tx: Tx, snapshot: string): Promise<string[]> {
  const { rows } = await sql<{ layer_uuid: string }>`SELECT layer_uuid FROM naive_pair
    WHERE snapshot_id = ${snapshot} ORDER BY position`.execute(tx.db);
  return rows.map((row) => row.layer_uuid);
}
