/**
 * The PostgreSQL dialect: a bounded pool, READ COMMITTED with explicit row locks, bounded waits.
 *
 * The server ends a statement that takes too long. One that has gone silent (power cut, partition)
 * ends nothing, and TCP would wait for it for a quarter of an hour: so a connection is given up
 * after `statementTimeoutMs + connectTimeoutMs` without an answer, and counts as lost.
 *
 * Conflicts that are retried: serialization failure, deadlock, lock timeout. A lost connection is
 * retried once; a commit whose answer was lost is safe to run again, since every write is
 * idempotent.
 */
import { Socket } from 'node:net';
import { Kysely, PostgresDialect, PostgresDriver, sql } from 'kysely';
import type { DatabaseConnection, Driver, PostgresDialectConfig } from 'kysely';
import type { PostgresPoolClient } from 'kysely';
import pg from 'pg';
import type { Clock } from '../clock.ts';
import { Failure, systemCode } from '../result.ts';
import type { DialectPort, StatementEvent, Verdict } from './database.ts';
import { exactInteger } from './errors.ts';
import type { CatalogError } from './errors.ts';
import type { CatalogSchema } from './schema.ts';

const columnTypes = { text: 'text COLLATE "C"', int8: 'bigint', suffix: '' };

/** Key of the advisory lock that migrators take: "VARV" in ASCII. */
const MIGRATION_LOCK = 0x56415256;

export interface PostgresOptions {
  readonly clock: Clock;
  readonly poolMax: number;
  readonly connectTimeoutMs: number;
  readonly statementTimeoutMs: number;
  readonly lockTimeoutMs: number;
  readonly onStatement?: ((event: StatementEvent) => void) | undefined;
}

/**
 * Of a wait for an answer. Counted, not measured: a process that was stopped for long has waited
 * for one part of it, and finds the answer before the next.
 */
const WAIT_PARTS = 4;

const unavailable = (message: string): CatalogError => ({
  kind: 'catalog-unavailable',
  message: `PostgreSQL: ${message}`,
});

class GuardedDriver extends PostgresDriver {
  override async acquireConnection(): Promise<DatabaseConnection> {
    try {
      return await super.acquireConnection();
    } catch (error) {
      throw new LostConnection(error);
    }
  }
}

class GuardedDialect extends PostgresDialect {
  readonly #config: PostgresDialectConfig;
  constructor(config: PostgresDialectConfig) {
    super(config);
    this.#config = config;
  }
  override createDriver(): Driver {
    return new GuardedDriver(this.#config);
  }
}

/** No connection could be had: the driver's errors for that carry no code of their own. */
class LostConnection extends Error {
  override readonly name = 'LostConnection';
  constructor(cause: unknown) {
    super(cause instanceof Error ? cause.message || String(systemCode(cause)) : String(cause), {
      cause,
    });
  }
}

/**
 * A connection for one transaction. Without an answer for `answerMsMax` it is destroyed, not given
 * back: what comes late would be taken for the next statement's answer.
 */
function lend(client: pg.PoolClient, answerMsMax: number, clock: Clock): PostgresPoolClient {
  let isDestroyed = false;
  const watch = async (answered: AbortSignal): Promise<void> => {
    for (let part = 0; part < WAIT_PARTS && !answered.aborted; part += 1) {
      await clock.sleep(answerMsMax / WAIT_PARTS, answered).catch(() => undefined);
    }
    if (answered.aborted || isDestroyed) return;
    isDestroyed = true;
    client.release(true);
  };
  const query = async (text: string, values?: unknown[]): Promise<unknown> => {
    const answered = new AbortController();
    void watch(answered.signal);
    try {
      return await client.query(text, values);
    } catch (error) {
      if (!isDestroyed) throw error;
      throw new Error(`no answer from the server within ${answerMsMax} ms`, { cause: error });
    } finally {
      answered.abort();
    }
  };
  return {
    // Its other use, with a cursor, comes only with an option that is not given.
    query: query as PostgresPoolClient['query'],
    release: (isBroken) => {
      if (!isDestroyed) client.release(isBroken);
    },
  };
}

/** Those of one pool, until they are closed. */
class Sockets {
  readonly #open = new Set<Socket>();

  create(): Socket {
    const socket = new Socket();
    this.#open.add(socket);
    return socket.once('close', () => this.#open.delete(socket));
  }

  /** After goodbyes have been said. A silent server answers none, and its socket is destroyed. */
  async closed(withinMs: number, clock: Clock): Promise<void> {
    const sockets = [...this.#open];
    const all = sockets.map((socket) => new Promise((resolve) => socket.once('close', resolve)));
    const ended = new AbortController();
    void clock.sleep(withinMs, ended.signal).then(
      () => {
        for (const socket of sockets) socket.destroy();
      },
      () => undefined,
    );
    await Promise.all(all);
    ended.abort();
  }
}

/** The driver's own parsers, by any type's number: its declaration lists only some. */
const textParserOf = pg.types.getTypeParser as (oid: number, format?: string) => unknown;
const INT8_OID: number = pg.types.builtins.INT8;

/** int8 as a number that is exact, or an error: never a rounded one, never text. */
function typeParser(oid: number, format?: 'text' | 'binary'): unknown {
  if (oid === INT8_OID && format !== 'binary') {
    return (text: string): number => exactInteger(BigInt(text));
  }
  return textParserOf(oid, format);
}

export function openPostgres(url: string, options: PostgresOptions): DialectPort {
  const sockets = new Sockets();
  const pool = new pg.Pool({
    connectionString: url,
    stream: () => sockets.create(),
    keepAlive: true,
    max: options.poolMax,
    connectionTimeoutMillis: options.connectTimeoutMs,
    statement_timeout: options.statementTimeoutMs,
    lock_timeout: options.lockTimeoutMs,
    idle_in_transaction_session_timeout: 60_000,
    application_name: 'varve',
    types: { getTypeParser: typeParser as typeof pg.types.getTypeParser },
  });
  // An idle connection that breaks is dropped by the pool; the next user gets a new one.
  pool.on('error', () => undefined);
  // One that breaks while lent out tells its client, who learns of it by the next statement's
  // failure.
  pool.on('connect', (client) => client.on('error', () => undefined));
  const answerMsMax = options.statementTimeoutMs + options.connectTimeoutMs;
  const lending = {
    connect: async () => lend(await pool.connect(), answerMsMax, options.clock),
    end: () => pool.end(),
  };
  const failedStatements = new WeakSet();
  const kysely = new Kysely<CatalogSchema>({
    dialect: new GuardedDialect({ pool: lending }),
    log: (event) => {
      if (event.level === 'error' && event.error instanceof Error) {
        failedStatements.add(event.error);
      }
      options.onStatement?.({
        sql: event.query.sql,
        durationMs: event.queryDurationMillis,
        failed: event.level === 'error',
      });
    },
  });
  return {
    name: 'postgres',
    kysely,
    rowLocks: true,
    columnTypes,
    migrationLock: sql`SELECT pg_advisory_xact_lock(${sql.lit(MIGRATION_LOCK)})`,
    tableExists: (name) => sql`SELECT 1 WHERE to_regclass(${name}) IS NOT NULL`,
    classify: (error) => classify(error, failedStatements),
    close: async () => {
      await kysely.destroy();
      await sockets.closed(options.connectTimeoutMs, options.clock);
    },
    freeReserve: () => Promise.resolve(false),
    restoreReserve: () => Promise.resolve(),
  };
}

const conflictCodes = new Set(['40001', '40P01', '55P03']);
/** Classes: connection exception, and operator intervention but for query_canceled. */
const isLost = (code: string): boolean =>
  code.startsWith('08') || (code.startsWith('57') && code !== '57014') || code === '53300';

function classify(error: unknown, failedStatements: WeakSet<object>): Verdict {
  if (error instanceof LostConnection) {
    return { kind: 'lost', error: unavailable(error.message) };
  }
  if (error instanceof Failure || !(error instanceof Error)) return { kind: 'foreign' };
  const fromStatement = failedStatements.has(error);
  if (!(error instanceof pg.DatabaseError)) {
    // The driver's own errors (connection ended, socket error) come out of a statement, without
    // SQLSTATE.
    return fromStatement
      ? { kind: 'lost', error: unavailable(error.message) }
      : { kind: 'foreign' };
  }
  const code = error.code ?? '';
  const message = `PostgreSQL: ${error.message} (${code})`;
  if (conflictCodes.has(code))
    return { kind: 'conflict', error: { kind: 'catalog-busy', message } };
  if (code.startsWith('23')) {
    return { kind: 'constraint', error: { kind: 'catalog-corrupt', message } };
  }
  if (isLost(code)) return { kind: 'lost', error: { kind: 'catalog-unavailable', message } };
  if (code === '57014') return { kind: 'fatal', error: { kind: 'catalog-timeout', message } };
  if (code === '53100') return { kind: 'fatal', error: { kind: 'catalog-full', message } };
  if (code.startsWith('58')) return { kind: 'fatal', error: { kind: 'catalog-io', message } };
  if (code.startsWith('XX')) return { kind: 'fatal', error: { kind: 'catalog-corrupt', message } };
  // What a statement is and what it is given are ours: the schema is not the one it was written for.
  const isOurs = code.startsWith('22') || (code.startsWith('42') && code !== '42501');
  // The rest is the server's to say and may change: who may connect, whether it may be written to,
  // what memory and settings it has.
  return {
    kind: 'fatal',
    error: { kind: isOurs ? 'catalog-corrupt' : 'catalog-unavailable', message },
  };
}
