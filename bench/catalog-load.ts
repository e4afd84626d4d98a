/** Fills an empty catalog with retained layers, quickly, as the transactions would have left it. */
import SqliteConnection from 'better-sqlite3';
import pg from 'pg';

/** Layers of a chain; every eighth is the head of a snapshot. */
const CHAIN_LAYERS = 32;
const LAYERS_PER_SNAPSHOT = 8;
const ROWS_PER_INSERT = 5000;

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

/** Where rows go. The loader keeps the catalog's rules itself, so nothing checks them again. */
interface Sink {
  add(table: string, row: Row): Promise<void> | void;
  end(): Promise<void>;
}

function sqliteSink(path: string): Sink {
  const db = new SqliteConnection(path);
  db.pragma('synchronous = OFF');
  db.pragma('foreign_keys = OFF');
  db.pragma('cache_size = -1048576');
  db.pragma('wal_autocheckpoint = 0');
  db.exec('BEGIN');
  const statements = new Map<string, SqliteConnection.Statement>();
  return {
    add: (table, row) => {
      let statement = statements.get(table);
      if (statement === undefined) {
        const marks = row.map(() => '?').join();
        statement = db.prepare(`INSERT INTO ${table} VALUES (${marks})`);
        statements.set(table, statement);
      }
      statement.run(...row);
    },
    end: () => {
      db.exec('COMMIT; ANALYZE');
      db.pragma('wal_checkpoint(TRUNCATE)');
      db.close();
      return Promise.resolve();
    },
  };
}

async function postgresSink(url: string): Promise<Sink> {
  const client = new pg.Client({ connectionString: url });
  await client.connect();
  await client.query('SET session_replication_role = replica; SET synchronous_commit = off');
  const pending = new Map<string, Row[]>();
  const flush = async (table: string, rows: Row[]): Promise<void> => {
    const columns = (rows[0] ?? []).map((_, at) => rows.map((row) => row[at]));
    const isText = columns.map((column) => column.some((cell) => typeof cell === 'string'));
    const arrays = isText.map((text, at) => `$${at + 1}::${text ? 'text' : 'bigint'}[]`).join();
    await client.query(`INSERT INTO ${table} SELECT * FROM unnest(${arrays})`, columns);
    rows.length = 0;
  };
  return {
    add: async (table, row) => {
      const rows = pending.get(table) ?? [];
      pending.set(table, rows);
      rows.push(row);
      if (rows.length === ROWS_PER_INSERT) await flush(table, rows);
    },
    end: async () => {
      for (const [table, rows] of pending) if (rows.length > 0) await flush(table, rows);
      await client.query('VACUUM ANALYZE');
      await client.query('CHECKPOINT');
      await client.end();
    },
  };
}

/** Also every snapshot-to-layer pair: what the opponent stores. */
export async function loadCatalog(
  url: string,
  layers: number,
  options: { node: string; seed: number },
): Promise<Loaded> {
  const random = randomOf(options.seed);
  const heads: { layer: string; snapshot: string; depth: number }[] = [];
  const isSqlite = url.startsWith('sqlite:');
  const sink = isSqlite ? sqliteSink(url.slice('sqlite:'.length)) : await postgresSink(url);
  for (let made = 0; made < layers; made += CHAIN_LAYERS) {
    await addChain(sink, random, heads, options.node);
  }
  await sink.end();
  return { heads, layers };
}

async function addChain(
  sink: Sink,
  random: () => number,
  heads: { layer: string; snapshot: string; depth: number }[],
  node: string,
): Promise<void> {
  const object = async (kind: string): Promise<string> => {
    const digest = digestOf(random);
    const key = `${kind}/${digest.slice(7)}/${uuidOf(random)}`;
    await sink.add('artifact', [key, kind, digest, 1_048_576, 1]);
    return key;
  };
  const chain: string[] = [];
  for (let depth = 1; depth <= CHAIN_LAYERS; depth += 1) {
    const uuid = uuidOf(random);
    const below = chain.at(-1) ?? null;
    await sink.add('layer', [uuid, below, await object('layer'), 2 ** 30, depth, 1, null, 0]);
    chain.push(uuid);
    if (depth % LAYERS_PER_SNAPSHOT !== 0) continue;
    const content = uuidOf(random);
    const snapshot = uuidOf(random);
    await sink.add('content', [content, await object('manifest'), digestOf(random), 1]);
    await sink.add('content_head', [content, 'memory', uuid]);
    await sink.add('content_artifact', [content, 'vm-state', await object('vm-state')]);
    const vm = `vm-${Math.floor(random() * 1000)}`;
    const time = 1_700_000_000_000 + heads.length;
    await sink.add('snapshot', [snapshot, content, content, vm, node, time, null, null, null]);
    for (const [position, layer] of chain.entries()) {
      await sink.add('naive_pair', [snapshot, position, layer]);
    }
    heads.push({ layer: uuid, snapshot, depth });
  }
}
