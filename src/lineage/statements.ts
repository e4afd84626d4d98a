import type { Database, Statement } from 'better-sqlite3';

type Value = string | number | bigint | Uint8Array | null;
type Row = Record<string, Value>;

type Prepared = Statement<Value[], Row>;

const prepared = new WeakMap<Database, Map<string, Prepared>>();

/** The prepared statement of `sql`, made once per connection. */
function statement(db: Database, sql: string): Prepared {
  const known = prepared.get(db) ?? new Map<string, Prepared>();
  prepared.set(db, known);
  const made = known.get(sql) ?? db.prepare<Value[], Row>(sql);
  known.set(sql, made);
  return made;
}

/* eslint-disable @typescript-eslint/no-unnecessary-type-parameters --
   The caller names the row's shape once, here, instead of casting at each use: the tables are
   STRICT. */

/** The first row, whose columns are what `Shape` says. */
export function one<Shape>(db: Database, sql: string, ...values: Value[]): Shape | undefined {
  return statement(db, sql).get(...values) as Shape | undefined;
}

/** All rows. */
export function all<Shape>(db: Database, sql: string, ...values: Value[]): Shape[] {
  return statement(db, sql).all(...values) as Shape[];
}

/* eslint-enable @typescript-eslint/no-unnecessary-type-parameters */

/** Rows changed. */
export function run(db: Database, sql: string, ...values: Value[]): number {
  return statement(db, sql).run(...values).changes;
}
