/**
 * The SQLite dialect: one connection per process, WAL, durable commits.
 *
 * The driver waits for locks inside a native call, on the event loop's thread. So it never waits
 * here (`busy_timeout = 0`): a lock held by another process makes BEGIN IMMEDIATE, or opening the
 * file, fail at once, and it is tried again after a pause in which everything else runs.
 */
import { mkdir, open, rm, stat } from 'node:fs/promises';
import { dirname } from 'node:path';
import SqliteConnection from 'better-sqlite3';
import { CompiledQuery, Kysely, SqliteDialect, SqliteDriver, sql } from 'kysely';
import type { DatabaseConnection, Driver, SqliteDialectConfig, TransactionSettings } from 'kysely';
import type { SqliteDatabase } from 'kysely';
import type { Clock } from '../clock.ts';
import { Failure, assert, systemCode } from '../result.ts';
import { MIB } from '../units.ts';
import { backoffMs } from './database.ts';
import type { DialectPort, StatementEvent, Verdict } from './database.ts';
import { exactInteger } from './errors.ts';
import type { CatalogError, CatalogErrorKind } from './errors.ts';
import type { CatalogSchema } from './schema.ts';

const columnTypes = { text: 'TEXT', int8: 'INTEGER', suffix: ' STRICT, WITHOUT ROWID' };

/** Enough for the WAL of a collection that frees the disk. */
const RESERVE_BYTES = 4 * MIB;
const JOURNAL_BYTES_MAX = 64 * MIB;
const CACHE_KIB = 64 * 1024;

/** Integers as numbers that are exact, or an error: the driver alone would round them. */
function exactly(db: SqliteConnection.Database): SqliteDatabase {
  return {
    close: () => db.close(),
    prepare: (text) => {
      const statement = db.prepare<unknown[], Record<string, unknown>>(text);
      const { reader } = statement;
      if (reader) statement.safeIntegers(true);
      return {
        reader,
        all: (parameters) => statement.all(parameters).map(exactRow),
        run: (parameters) => statement.run(parameters),
        iterate: function* (parameters) {
          for (const row of statement.iterate(parameters)) yield exactRow(row);
        },
      };
    },
  };
}

function exactRow(row: Record<string, unknown>): Record<string, unknown> {
  for (const [column, value] of Object.entries(row)) {
    if (typeof value === 'bigint') row[column] = exactInteger(value);
  }
  return row;
}

class ImmediateDriver extends SqliteDriver {
  readonly #db: SqliteConnection.Database;
  constructor(config: SqliteDialectConfig, db: SqliteConnection.Database) {
    super(config);
    this.#db = db;
  }
  override async beginTransaction(
    connection: DatabaseConnection,
    settings?: TransactionSettings,
  ): Promise<void> {
    const begin = settings?.accessMode === 'read only' ? 'begin' : 'begin immediate';
    await connection.executeQuery(CompiledQuery.raw(begin));
  }
  /** Some failures (disk full, I/O) have already rolled back. */
  override async rollbackTransaction(connection: DatabaseConnection): Promise<void> {
    if (this.#db.inTransaction) await super.rollbackTransaction(connection);
  }
}

class ImmediateDialect extends SqliteDialect {
  readonly #config: SqliteDialectConfig;
  readonly #db: SqliteConnection.Database;
  constructor(db: SqliteConnection.Database) {
    const database = exactly(db);
    super({ database });
    this.#config = { database };
    this.#db = db;
  }
  override createDriver(): Driver {
    return new ImmediateDriver(this.#config, this.#db);
  }
}

const kinds: Readonly<Record<string, CatalogErrorKind>> = {
  SQLITE_FULL: 'catalog-full',
  SQLITE_CORRUPT: 'catalog-corrupt',
  SQLITE_NOTADB: 'catalog-corrupt',
  SQLITE_CANTOPEN: 'catalog-unavailable',
  SQLITE_READONLY: 'catalog-unavailable',
  SQLITE_PERM: 'catalog-unavailable',
  SQLITE_AUTH: 'catalog-unavailable',
  SQLITE_NOMEM: 'catalog-unavailable',
  SQLITE_IOERR: 'catalog-io',
};

/** Another transaction's doing; `PROTOCOL`: many began at once, and each kept the others from it. */
const conflicts: ReadonlySet<string> = new Set(['SQLITE_BUSY', 'SQLITE_LOCKED', 'SQLITE_PROTOCOL']);

/** SQLite's codes are a primary code and, after another `_`, a detail. */
function classify(error: unknown): Verdict {
  if (error instanceof Failure) return { kind: 'foreign' };
  const code = systemCode(error);
  if (code === undefined || !code.startsWith('SQLITE_')) return { kind: 'foreign' };
  const primary = code.split('_').slice(0, 2).join('_');
  const message = `SQLite: ${(error as Error).message} (${code})`;
  if (conflicts.has(primary)) {
    return { kind: 'conflict', error: { kind: 'catalog-busy', message } };
  }
  if (primary === 'SQLITE_CONSTRAINT') {
    return { kind: 'constraint', error: { kind: 'catalog-corrupt', message } };
  }
  // Writing needs the shared-memory file too, and says so in its own way when the disk is full.
  if (code === 'SQLITE_IOERR_SHMSIZE') {
    return { kind: 'fatal', error: { kind: 'catalog-full', message } };
  }
  // What is in no list is about the statement: the schema is not the one it was written for.
  const kind = kinds[primary] ?? 'catalog-corrupt';
  return { kind: 'fatal', error: { kind, message } };
}

export interface SqliteOptions {
  readonly clock: Clock;
  /** 0 ≤ random() < 1. Spreads retries. */
  readonly random: () => number;
  /** How long opening is tried again while others hold the locks that it needs. */
  readonly lockTimeoutMs: number;
  readonly onStatement?: ((event: StatementEvent) => void) | undefined;
}

/** Opens or creates the file and its folder. Throws `Failure<CatalogError>`. */
export async function openSqlite(path: string, options: SqliteOptions): Promise<DialectPort> {
  const reservePath = `${path}.reserve`;
  const restoreReserve = (): Promise<void> => writeReserve(reservePath);
  const freeReserve = (): Promise<boolean> => removeReserve(reservePath);
  try {
    if (path !== ':memory:') await mkdir(dirname(path), { recursive: true });
    let db: SqliteConnection.Database;
    try {
      db = await connect(path, options);
    } catch (error) {
      const verdict = classify(error);
      const full = verdict.kind === 'fatal' && verdict.error.kind === 'catalog-full';
      if (!full || !(await freeReserve())) throw error;
      db = await connect(path, options);
    }
    if (path !== ':memory:') await restoreReserve();
    return port(db, options.onStatement, { freeReserve, restoreReserve });
  } catch (error) {
    const verdict = classify(error);
    if (verdict.kind !== 'foreign') throw new Failure<CatalogError>(verdict.error, error);
    if (systemCode(error) === undefined) throw error;
    const message = `cannot open the catalog ${path}: ${(error as Error).message}`;
    throw new Failure<CatalogError>({ kind: 'catalog-unavailable', message }, error);
  }
}

/** Many processes may start at once, and changing to WAL takes an exclusive lock. */
async function connect(path: string, options: SqliteOptions): Promise<SqliteConnection.Database> {
  const { clock, random, lockTimeoutMs } = options;
  const endNs = clock.monotonicNs() + BigInt(Math.ceil(lockTimeoutMs)) * 1_000_000n;
  for (let attempts = 1; ; attempts += 1) {
    try {
      return connectOnce(path);
    } catch (error) {
      if (classify(error).kind !== 'conflict' || clock.monotonicNs() >= endNs) throw error;
    }
    await clock.sleep(backoffMs(attempts, random), new AbortController().signal);
  }
}

function connectOnce(path: string): SqliteConnection.Database {
  const db = new SqliteConnection(path, { timeout: 0 });
  try {
    db.pragma('foreign_keys = ON');
    db.pragma('synchronous = FULL');
    db.pragma(`cache_size = -${CACHE_KIB}`);
    db.pragma(`journal_size_limit = ${JOURNAL_BYTES_MAX}`);
    if (path !== ':memory:') ensureWal(db);
    assert(db.pragma('foreign_keys', { simple: true }) === 1, 'foreign keys are enforced');
    assert(db.pragma('synchronous', { simple: true }) === 2, 'commits are durable');
    assert(db.pragma('busy_timeout', { simple: true }) === 0, 'locks are not waited for here');
    return db;
  } catch (error) {
    db.close();
    throw error;
  }
}

/** Changing to WAL takes an exclusive lock; a file that is in WAL already stays as it is. */
function ensureWal(db: SqliteConnection.Database): void {
  if (db.pragma('journal_mode', { simple: true }) === 'wal') return;
  const mode = db.pragma('journal_mode = WAL', { simple: true });
  assert(mode === 'wal', `the catalog is in WAL mode, not ${String(mode)}`);
}

function port(
  db: SqliteConnection.Database,
  onStatement: ((event: StatementEvent) => void) | undefined,
  reserve: Pick<DialectPort, 'freeReserve' | 'restoreReserve'>,
): DialectPort {
  const kysely = new Kysely<CatalogSchema>({
    dialect: new ImmediateDialect(db),
    log: (event) =>
      onStatement?.({
        sql: event.query.sql,
        durationMs: event.queryDurationMillis,
        failed: event.level === 'error',
      }),
  });
  return {
    name: 'sqlite',
    kysely,
    rowLocks: false,
    columnTypes,
    migrationLock: null,
    tableExists: (name) => sql`SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name = ${name}`,
    classify,
    close: () => kysely.destroy(),
    ...reserve,
  };
}

/** Real blocks, not a hole. Without room for it there is none, and that is no error. */
async function writeReserve(path: string): Promise<void> {
  try {
    if ((await stat(path)).size >= RESERVE_BYTES) return;
  } catch (error) {
    if (systemCode(error) !== 'ENOENT') return;
  }
  try {
    const file = await open(path, 'w', 0o600);
    try {
      await file.writeFile(Buffer.alloc(RESERVE_BYTES, 0xff));
    } finally {
      await file.close();
    }
  } catch {
    await rm(path, { force: true }).catch(() => undefined);
  }
}

async function removeReserve(path: string): Promise<boolean> {
  try {
    await rm(path);
    return true;
  } catch {
    return false;
  }
}
