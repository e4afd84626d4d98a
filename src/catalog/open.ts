/** Opens a catalog: picks the dialect, and checks or applies migrations. */
import { systemClock } from '../clock.ts';
import type { Clock } from '../clock.ts';
import { Failure } from '../result.ts';
import type { Result } from '../result.ts';
import { migrations as ownMigrations } from '../../migrations/index.ts';
import type { Migration } from '../../migrations/index.ts';
import type { Catalog } from './catalog.ts';
import { Database } from './database.ts';
import type { DatabaseOptions, DialectPort, StatementEvent, TransactionEvent } from './database.ts';
import type { CatalogError } from './errors.ts';
import { catalogOn, edge } from './face.ts';
import type { OpenCatalog } from './face.ts';
import { migrate, migrationStatus } from './migrator.ts';
import { openPostgres } from './postgres.ts';
import { openSqlite } from './sqlite.ts';

export type { OpenCatalog } from './face.ts';

export interface CatalogConfig {
  /** `sqlite:/absolute/path`, or `postgres://user@host/database`. */
  readonly url: string;
  /** `apply` (default): missing migrations are applied. `check`: they are an error. */
  readonly migrations?: 'apply' | 'check' | undefined;
  /** PostgreSQL connections. Default 8. */
  readonly poolMax?: number | undefined;
  /** Until a connection attempt counts as failed. Default 2000. */
  readonly connectTimeoutMs?: number | undefined;
  /** PostgreSQL: longest statement. Default 15000. */
  readonly statementTimeoutMs?: number | undefined;
  /** Longest time a transaction is retried on locks and conflicts. Default 10000. */
  readonly lockTimeoutMs?: number | undefined;
  readonly onStatement?: ((event: StatementEvent) => void) | undefined;
  readonly onTransaction?: ((event: TransactionEvent) => void) | undefined;
  readonly clock?: Clock | undefined;
  readonly random?: (() => number) | undefined;
  /** Only for tests of the migrator. */
  readonly migrationList?: readonly Migration[] | undefined;
}

export async function openCatalog(
  config: CatalogConfig,
): Promise<Result<OpenCatalog, CatalogError>> {
  return await edge(async () => {
    const database = await openCurrent(config);
    return catalogOn(database, database.port.name);
  });
}

/**
 * With this program's schema, or one that it can live with. Throws `Failure<CatalogError>`, and
 * then leaves nothing open.
 */
export async function openCurrent(config: CatalogConfig): Promise<Database> {
  const database = await openDatabase(config);
  try {
    const list = config.migrationList ?? ownMigrations;
    // A database that lacks nothing is not written, so that nobody's lock is waited for.
    const { pending } = await migrationStatus(database, list);
    if (pending.length > 0) {
      if (config.migrations === 'check') refuseOlder(pending);
      await migrate(database, list);
    }
    return database;
  } catch (error) {
    await database.close();
    throw error;
  }
}

/** Without looking at migrations. Throws `Failure<CatalogError>`. */
export async function openDatabase(config: CatalogConfig): Promise<Database> {
  const patience = {
    clock: config.clock ?? systemClock,
    random: config.random ?? Math.random,
    lockTimeoutMs: config.lockTimeoutMs ?? 10_000,
  };
  const port = await openPort(config, patience);
  return new Database(port, { ...patience, onTransaction: config.onTransaction });
}

/** Throws `Failure<CatalogError>` for a URL that names none. */
export function dialectOf(url: string): Catalog['dialect'] {
  if (url.startsWith('sqlite:')) return 'sqlite';
  if (url.startsWith('postgres://') || url.startsWith('postgresql://')) return 'postgres';
  throw new Failure<CatalogError>({
    kind: 'catalog-unavailable',
    message: 'the catalog URL is neither sqlite:/path nor postgres://…',
  });
}

async function openPort(
  config: CatalogConfig,
  patience: Pick<DatabaseOptions, 'clock' | 'random' | 'lockTimeoutMs'>,
): Promise<DialectPort> {
  const { url, onStatement } = config;
  if (dialectOf(url) === 'sqlite') {
    return await openSqlite(url.slice('sqlite:'.length), { ...patience, onStatement });
  }
  return openPostgres(url, {
    clock: patience.clock,
    poolMax: config.poolMax ?? 8,
    connectTimeoutMs: config.connectTimeoutMs ?? 2000,
    statementTimeoutMs: config.statementTimeoutMs ?? 15_000,
    lockTimeoutMs: Math.min(patience.lockTimeoutMs, 5000),
    onStatement,
  });
}

function refuseOlder(pending: readonly string[]): never {
  const message = `the catalog lacks migrations (${pending.join(', ')}): run "varve migrate"`;
  throw new Failure<CatalogError>({ kind: 'catalog-older', message });
}
