/**
 * Applies migrations, forward only.
 *
 * M1 One transaction per migration, claim row first: a killed migrator leaves whole migrations or
 *    nothing.
 * M2 One migrator at a time: SQLite's write lock, PostgreSQL's advisory lock. The others find the
 *    claim.
 * M3 A database with a breaking migration unknown to this program is refused, untouched.
 */
import { sql } from 'kysely';
import type { Migration } from '../../migrations/index.ts';
import { Failure } from '../result.ts';
import type { Database, DialectPort, Tx } from './database.ts';
import type { CatalogError } from './errors.ts';

export interface MigrationStatus {
  readonly applied: readonly string[];
  readonly pending: readonly string[];
  /** In the database, unknown to this program. */
  readonly newer: readonly { readonly id: string; readonly breaking: boolean }[];
}

interface AppliedRow {
  readonly id: string;
  readonly breaking: number;
}

/**
 * Applies what is missing. Throws `Failure<CatalogError>`. Returns the ids that this call applied.
 */
export async function migrate(
  database: Database,
  migrations: readonly Migration[],
): Promise<string[]> {
  const applied: string[] = [];
  for (;;) {
    const id = await database.write('migrate', (tx) => applyNext(tx, database.port, migrations));
    if (id === undefined) return applied;
    applied.push(id);
  }
}

/** Reads only. Throws `Failure<CatalogError>`, also for a database that is too new. */
export async function migrationStatus(
  database: Database,
  migrations: readonly Migration[],
): Promise<MigrationStatus> {
  const rows = await database.read('migration-status', async (tx) =>
    (await hasMigrationTable(tx, database.port)) ? appliedRows(tx) : [],
  );
  return compare(rows, migrations);
}

async function applyNext(
  tx: Tx,
  port: DialectPort,
  migrations: readonly Migration[],
): Promise<string | undefined> {
  const types = port.columnTypes;
  await port.migrationLock?.execute(tx.db);
  await sql
    .raw(
      `CREATE TABLE IF NOT EXISTS migration (
        id ${types.text} NOT NULL PRIMARY KEY,
        breaking ${types.int8} NOT NULL,
        applied_at_ms ${types.int8} NOT NULL
      )${types.suffix}`,
    )
    .execute(tx.db);
  const { pending } = compare(await appliedRows(tx), migrations);
  const next = migrations.find((migration) => migration.id === pending[0]);
  if (next === undefined) return undefined;
  await tx.db
    .insertInto('migration')
    .values({ id: next.id, breaking: next.breaking ? 1 : 0, applied_at_ms: tx.nowMs })
    .execute();
  for (const statement of next.up(types)) await sql.raw(statement).execute(tx.db);
  return next.id;
}

function appliedRows(tx: Tx): Promise<AppliedRow[]> {
  return tx.db.selectFrom('migration').select(['id', 'breaking']).orderBy('id').execute();
}

async function hasMigrationTable(tx: Tx, port: DialectPort): Promise<boolean> {
  return (await port.tableExists('migration').execute(tx.db)).rows.length > 0;
}

function compare(rows: readonly AppliedRow[], migrations: readonly Migration[]): MigrationStatus {
  const known = new Set(migrations.map((migration) => migration.id));
  const applied = new Set(rows.map((row) => row.id));
  const newer = rows
    .filter((row) => !known.has(row.id))
    .map((row) => ({ id: row.id, breaking: row.breaking !== 0 }));
  const blocking = newer.filter((row) => row.breaking).map((row) => row.id);
  if (blocking.length > 0) {
    const message =
      `the catalog was changed by a newer program (${blocking.join(', ')}); ` +
      'use that program or a newer one';
    throw new Failure<CatalogError>({ kind: 'catalog-newer', message });
  }
  return {
    applied: [...applied].filter((id) => known.has(id)),
    pending: migrations.map((migration) => migration.id).filter((id) => !applied.has(id)),
    newer,
  };
}
