/**
 * Runs the catalog's transactions on either dialect, and retries them as a whole.
 *
 * D1 A write transaction holds the database's write lock (SQLite: IMMEDIATE) or row locks
 *    (PostgreSQL) from its first decision to its commit. Its function touches nothing but `tx`, so
 *    running it again is safe.
 * D2 Statements of one transaction never mix with those of another: SQLite has one connection, lent
 *    to one transaction at a time; PostgreSQL lends each a connection of its own.
 * D3 A transaction begun inside another is a bug, and says so instead of waiting for itself.
 */
import { AsyncLocalStorage } from 'node:async_hooks';
import type { Kysely, RawBuilder } from 'kysely';
import type { ColumnTypes } from '../../migrations/index.ts';
import type { Clock } from '../clock.ts';
import { Failure, assert } from '../result.ts';
import type { CatalogError } from './errors.ts';
import type { CatalogSchema } from './schema.ts';

/** What query functions get. */
export interface Tx {
  readonly db: Kysely<CatalogSchema>;
  /** One reading of the clock for everything the transaction writes. */
  readonly nowMs: number;
  /** Whether rows must be locked one by one, because others write at the same time. */
  readonly rowLocks: boolean;
}

/** What to do about an error that came out of a transaction. */
export type Verdict =
  /** Lost against another transaction: run it again. */
  | { readonly kind: 'conflict'; readonly error: CatalogError }
  /**
   * A constraint refused what the transaction's own checks had allowed: its view was out of date.
   */
  | { readonly kind: 'constraint'; readonly error: CatalogError }
  /** The connection is gone; whether a commit under way took place is unknown. */
  | { readonly kind: 'lost'; readonly error: CatalogError }
  | { readonly kind: 'fatal'; readonly error: CatalogError }
  /** None of the database's: a refusal on its way out, or a bug. */
  | { readonly kind: 'foreign' };

/** One dialect. Everything particular to it is in its own file. */
export interface DialectPort {
  readonly name: 'sqlite' | 'postgres';
  readonly kysely: Kysely<CatalogSchema>;
  readonly rowLocks: boolean;
  readonly columnTypes: ColumnTypes;
  /** Held to the end of a transaction that migrates; null where the write lock is enough. */
  readonly migrationLock: RawBuilder<unknown> | null;
  /** One row if there is such a table, else none. */
  readonly tableExists: (name: string) => RawBuilder<unknown>;
  readonly classify: (error: unknown) => Verdict;
  /** After the last transaction. */
  readonly close: () => Promise<void>;
  /**
   * Gives the disk space kept for hard times back to a database that ran out of it. False: there is
   * none.
   */
  readonly freeReserve: () => Promise<boolean>;
  /** Takes such space again, if there is room. */
  readonly restoreReserve: () => Promise<void>;
}

export interface StatementEvent {
  readonly sql: string;
  readonly durationMs: number;
  readonly failed: boolean;
}

export interface TransactionEvent {
  readonly name: string;
  readonly durationMs: number;
  readonly attempts: number;
  /** `refused` is an answer, not an error. */
  readonly outcome: 'done' | 'refused' | CatalogError['kind'];
}

export interface DatabaseOptions {
  readonly clock: Clock;
  /** 0 ≤ random() < 1. Spreads retries. */
  readonly random: () => number;
  /** How long a transaction may be retried on locks and conflicts. */
  readonly lockTimeoutMs: number;
  readonly onTransaction?: ((event: TransactionEvent) => void) | undefined;
}

/** Rows or keys per statement: below every bound of either dialect on parameters. */
const CHUNK_ROWS = 500;
const CONSTRAINT_ATTEMPTS_MAX = 4;
const LOST_ATTEMPTS_MAX = 2;
const BACKOFF_MS_MAX = 100;

export function* chunks<T>(all: readonly T[]): Iterable<readonly T[]> {
  for (let from = 0; from < all.length; from += CHUNK_ROWS) {
    yield all.slice(from, from + CHUNK_ROWS);
  }
}

/** What runs the catalog's transactions: a database that is open, or one that may be away. */
export interface Transactions {
  readonly clock: Clock;
  /** One consistent view of all statements in `work`. Throws `Failure<CatalogError>`. */
  read<T>(name: string, work: (tx: Tx) => Promise<T>): Promise<T>;
  /**
   * All of `work` or nothing. May run it several times. Throws `Failure<CatalogError>`, or what
   * `work` throws.
   */
  write<T>(name: string, work: (tx: Tx) => Promise<T>): Promise<T>;
  /** As `DialectPort` says. */
  freeReserve(): Promise<boolean>;
  /** As `DialectPort` says. */
  restoreReserve(): Promise<void>;
  close(): Promise<void>;
}

export class Database implements Transactions {
  readonly port: DialectPort;
  readonly #options: DatabaseOptions;
  readonly #inside = new AsyncLocalStorage<{ active: boolean }>();
  readonly #running = new Set<Promise<unknown>>();
  #closing = false;

  constructor(port: DialectPort, options: DatabaseOptions) {
    this.port = port;
    this.#options = options;
  }

  get clock(): Clock {
    return this.#options.clock;
  }

  read<T>(name: string, work: (tx: Tx) => Promise<T>): Promise<T> {
    return this.#enter(name, () =>
      this.port.kysely
        .transaction()
        .setAccessMode('read only')
        .setIsolationLevel('repeatable read')
        .execute((db) => work({ db, nowMs: this.clock.nowMs(), rowLocks: false })),
    );
  }

  write<T>(name: string, work: (tx: Tx) => Promise<T>): Promise<T> {
    const { rowLocks, kysely } = this.port;
    return this.#enter(name, () =>
      kysely
        .transaction()
        .setIsolationLevel('read committed')
        .execute((db) => work({ db, nowMs: this.clock.nowMs(), rowLocks })),
    );
  }

  freeReserve(): Promise<boolean> {
    return this.port.freeReserve();
  }

  restoreReserve(): Promise<void> {
    return this.port.restoreReserve();
  }

  /** Waits for what runs, then closes. Later calls fail as `catalog-closed`. */
  async close(): Promise<void> {
    if (this.#closing) return;
    this.#closing = true;
    await Promise.allSettled(this.#running);
    await this.port.close();
  }

  async #enter<T>(name: string, transaction: () => Promise<T>): Promise<T> {
    assert(this.#inside.getStore()?.active !== true, `no transaction inside another: ${name}`);
    if (this.#closing) {
      throw new Failure<CatalogError>({ kind: 'catalog-closed', message: 'the catalog is closed' });
    }
    const store = { active: true };
    const running = this.#inside.run(store, () => this.#retry(name, transaction));
    this.#running.add(running);
    try {
      return await running;
    } finally {
      store.active = false;
      this.#running.delete(running);
    }
  }

  async #retry<T>(name: string, transaction: () => Promise<T>): Promise<T> {
    const { clock, lockTimeoutMs, onTransaction } = this.#options;
    const startNs = clock.monotonicNs();
    const elapsedMs = (): number => Number(clock.monotonicNs() - startNs) / 1e6;
    const report = (attempts: number, outcome: TransactionEvent['outcome']): void =>
      onTransaction?.({ name, durationMs: elapsedMs(), attempts, outcome });
    for (let attempts = 1; ; attempts += 1) {
      try {
        const value = await transaction();
        report(attempts, 'done');
        return value;
      } catch (thrown) {
        const verdict = this.port.classify(thrown);
        if (verdict.kind === 'foreign') {
          report(attempts, 'refused');
          throw thrown;
        }
        if (!mayRetry(verdict, attempts, elapsedMs() < lockTimeoutMs)) {
          report(attempts, verdict.error.kind);
          throw new Failure<CatalogError>(verdict.error, thrown);
        }
        await clock.sleep(backoffMs(attempts, this.#options.random), new AbortController().signal);
      }
    }
  }
}

/** Doubles from 1 ms, with jitter, so that those who collided do not collide again. */
export function backoffMs(attempts: number, random: () => number): number {
  const ceiling = Math.min(BACKOFF_MS_MAX, 2 ** Math.min(attempts, 10));
  return 1 + random() * ceiling;
}

function mayRetry(verdict: Verdict, attempts: number, inTime: boolean): boolean {
  switch (verdict.kind) {
    case 'conflict':
      return inTime;
    case 'constraint':
      return inTime && attempts < CONSTRAINT_ATTEMPTS_MAX;
    case 'lost':
      return inTime && attempts < LOST_ATTEMPTS_MAX;
    case 'fatal':
    case 'foreign':
      return false;
  }
}
