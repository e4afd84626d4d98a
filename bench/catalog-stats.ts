/** What the database itself says beside the times: sizes, and who waited for locks. */
import { setTimeout as later } from 'node:timers/promises';
import { sql } from 'kysely';
import pg from 'pg';
import type { OpenCatalog } from '../src/catalog/open.ts';

interface SizeRow {
  readonly name: string;
  /** Of the table itself, and of all its indexes; bytes. */
  readonly table_bytes: number;
  readonly index_bytes: number;
}

const sqliteSizes = sql<SizeRow>`SELECT s.tbl_name AS name,
    sum(CASE s.type WHEN 'table' THEN pgsize ELSE 0 END) AS table_bytes,
    sum(CASE s.type WHEN 'table' THEN 0 ELSE pgsize END) AS index_bytes
  FROM dbstat JOIN sqlite_schema s ON s.name = dbstat.name
  WHERE dbstat.aggregate = TRUE GROUP BY s.tbl_name`;
const postgresSizes = sql<SizeRow>`SELECT relname AS name, pg_table_size(oid) AS table_bytes,
    pg_indexes_size(oid) AS index_bytes
  FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace`;

/** Heads, which only we store, against pairs, which only the opponent does, and what both need. */
export async function sizesOf({ database, dialect }: OpenCatalog): Promise<string> {
  const query = dialect === 'sqlite' ? sqliteSizes : postgresSizes;
  const { rows } = await database.read('sizes', (tx) => query.execute(tx.db));
  const mib = (size: number): string => (size / 2 ** 20).toFixed(1);
  const of = (some: readonly SizeRow[]): string => {
    const [table, index] = some.reduce(
      ([tables, indexes], row) => [tables + row.table_bytes, indexes + row.index_bytes],
      [0, 0],
    );
    return `${mib(table)} + ${mib(index)} MiB`;
  };
  const own = new Set(['naive_pair', 'content_head']);
  const named = (name: string): SizeRow[] => rows.filter((row) => row.name === name);
  return (
    `tables + indexes: heads ${of(named('content_head'))}, pairs ${of(named('naive_pair'))}, ` +
    `layers ${of(named('layer'))}, ` +
    `all that both need ${of(rows.filter((row) => !own.has(row.name)))}`
  );
}

const SAMPLE_MS = 5;

export interface LockWaits extends AsyncDisposable {
  /** Sampled so far. */
  text(): string;
}

/** Asks the server again and again how many of its sessions in this database wait for a lock. */
export async function lockWaits(url: string): Promise<LockWaits> {
  const client = new pg.Client({ connectionString: url });
  await client.connect();
  const query = `SELECT count(*) FILTER (WHERE wait_event_type = 'Lock') AS waiting,
      count(*) FILTER (WHERE state <> 'idle') AS busy
    FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'varve'`;
  let [samples, waiting, busy, most] = [0, 0, 0, 0];
  const stop = new AbortController();
  const sampling = (async () => {
    for (; !stop.signal.aborted; samples += 1) {
      const row = (await client.query<{ waiting: string; busy: string }>(query)).rows[0];
      waiting += Number(row?.waiting);
      busy += Number(row?.busy);
      most = Math.max(most, Number(row?.waiting));
      await later(SAMPLE_MS);
    }
  })();
  return {
    text: () => {
      const share = busy === 0 ? 0 : (100 * waiting) / busy;
      const whole = `${share.toFixed(1)} % of busy sessions wait for a lock`;
      return `${whole} (${samples} samples, at most ${most})`;
    },
    [Symbol.asyncDispose]: async () => {
      stop.abort();
      await sampling;
      await client.end();
    },
  };
}
