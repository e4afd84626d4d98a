/** Fills an empty catalog with retained layers, quickly, as the transactions would have left it. */
import { sql } from 'kysely';
import type { Database, Tx } from '../src/catalog/database.ts';

/** Layers of a chain; every eighth is the head of a snapshot. */
const CHAIN_LAYERS = 32;
const LAYERS_PER_SNAPSHOT = 8;
const ROWS_PER_INSERT = 500;

/** mulberry32. */
export function randomOf(seed: number): () => number {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

export function uuidOf(random: () => number): string {
  const part = (digits: number): string =>
    Math.floor(random() * 16 ** digits)
      .toString(16)
      .padStart(digits, '0');
  return `${part(8)}-${part(4)}-${part(4)}-${part(4)}-${part(6)}${part(6)}`;
}

export const digestOf = (random: () => number): string =>
  `sha256:${Array.from({ length: 8 }, () => uuidOf(random).slice(0, 8)).join('')}`;

export interface Loaded {
  /** Heads of snapshots, with the snapshot's id and the depth of the chain. */
  readonly heads: readonly { layer: string; snapshot: string; depth: number }[];
  readonly layers: number;
}

type Row = readonly (string | number | null)[];

class Inserts {
  readonly #tx: Tx;
  readonly #rows = new Map<string, Row[]>();
  constructor(tx: Tx) {
    this.#tx = tx;
  }
  async add(table: string, row: Row): Promise<void> {
    const rows = this.#rows.get(table) ?? [];
    this.#rows.set(table, rows);
    rows.push(row);
    if (rows.length === ROWS_PER_INSERT) await this.#flush(table, rows);
  }
  async #flush(table: string, rows: Row[]): Promise<void> {
    const tuples = rows.map((row) => sql`(${sql.join(row)})`);
    await sql`INSERT INTO ${sql.table(table)} VALUES ${sql.join(tuples)}`.execute(this.#tx.db);
    rows.length = 0;
  }
  /** Referred-to tables first. */
  async end(): Promise<void> {
    for (const [table, rows] of this.#rows) if (rows.length > 0) await this.#flush(table, rows);
  }
}

/** With `pairs`, also every snapshot-to-layer pair: what the opponent stores. */
export async function loadCatalog(
  database: Database,
  layers: number,
  options: { node: string; seed: number; pairs: boolean },
): Promise<Loaded> {
  const random = randomOf(options.seed);
  const heads: { layer: string; snapshot: string; depth: number }[] = [];
  const chainsPerTransaction = 300;
  await durable(database, false);
  for (let made = 0; made < layers;) {
    await database.write('load', async (tx) => {
      await withoutChecks(tx);
      const inserts = new Inserts(tx);
      for (let chain = 0; chain < chainsPerTransaction && made < layers; chain += 1) {
        made += await addChain(inserts, random, heads, options);
      }
      await inserts.end();
    });
  }
  await sql`ANALYZE`.execute(database.port.kysely);
  await durable(database, true);
  return { heads, layers };
}

/** SQLite only: PostgreSQL's commits are few. */
async function durable(database: Database, isDurable: boolean): Promise<void> {
  if (database.port.name !== 'sqlite') return;
  const db = database.port.kysely;
  await sql.raw(`PRAGMA wal_autocheckpoint = ${isDurable ? 1000 : 50_000}`).execute(db);
  if (isDurable) await sql`PRAGMA wal_checkpoint(TRUNCATE)`.execute(db);
  await sql.raw(`PRAGMA synchronous = ${isDurable ? 'FULL' : 'OFF'}`).execute(db);
}

/** The loader keeps the rules itself; SQLite checks anyway, which its single writer can afford. */
async function withoutChecks(tx: Tx): Promise<void> {
  if (tx.rowLocks) await sql`SET LOCAL session_replication_role = replica`.execute(tx.db);
  else await sql`PRAGMA defer_foreign_keys = ON`.execute(tx.db);
}

async function addChain(
  inserts: Inserts,
  random: () => number,
  heads: { layer: string; snapshot: string; depth: number }[],
  options: { node: string; pairs: boolean },
): Promise<number> {
  const object = async (kind: string): Promise<string> => {
    const digest = digestOf(random);
    const key = `${kind}/${digest.slice(7)}/${uuidOf(random)}`;
    await inserts.add('artifact', [key, kind, digest, 1_048_576, 1]);
    return key;
  };
  const chain: string[] = [];
  for (let depth = 1; depth <= CHAIN_LAYERS; depth += 1) {
    const uuid = uuidOf(random);
    const below = chain.at(-1) ?? null;
    await inserts.add('layer', [uuid, below, await object('layer'), 2 ** 30, depth, 1]);
    chain.push(uuid);
    if (depth % LAYERS_PER_SNAPSHOT !== 0) continue;
    const content = uuidOf(random);
    const snapshot = uuidOf(random);
    await inserts.add('content', [content, await object('manifest'), digestOf(random), 1]);
    await inserts.add('content_head', [content, 'memory', uuid]);
    await inserts.add('content_artifact', [content, 'vm-state', await object('vm-state')]);
    const vm = `vm-${Math.floor(random() * 1000)}`;
    const time = 1_700_000_000_000 + heads.length;
    await inserts.add('snapshot', [snapshot, content, content, vm, options.node, time, null, null]);
    if (options.pairs) {
      for (const [position, layer] of chain.entries()) {
        await inserts.add('naive_pair', [snapshot, position, layer]);
      }
    }
    heads.push({ layer: uuid, snapshot, depth });
  }
  return CHAIN_LAYERS;
}
