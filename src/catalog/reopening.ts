/**
 * The catalog of a daemon that goes on without it: opened in the background, tried again until it
 * is there, and opened anew after it was lost.
 *
 * O1 One try at a time, with growing waits between them, and none after `close`.
 * O2 Who asks while the first try of an outage is under way waits for it. Once it has failed, they
 *    are told why at once, until a later try succeeds.
 * O3 Each time, its schema is looked at and the node registered before anyone gets it: what comes
 *    back may be newer than this program, or an older copy that has never heard of the node.
 */
import type { Clock } from '../clock.ts';
import { systemClock } from '../clock.ts';
import { Failure, err, ok } from '../result.ts';
import type { FailureDetail, Result } from '../result.ts';
import type { NodeId } from '../units.ts';
import type { Database, Transactions, Tx } from './database.ts';
import type { CatalogError, CatalogRefusal } from './errors.ts';
import { catalogOn } from './face.ts';
import type { OpenCatalog } from './face.ts';
import { findNode } from './node.queries.ts';
import { registerNode } from './nodes.ts';
import { dialectOf, openCurrent } from './open.ts';
import type { CatalogConfig } from './open.ts';

export type NodeForgotten = Extract<CatalogRefusal, { kind: 'node-forgotten' }>;

/** How the first try ended. */
export type FirstTry = Promise<Result<void, CatalogError | NodeForgotten>>;

export interface ReopeningOptions {
  /** One try. Throws `Failure<CatalogError>`, and then leaves nothing open. */
  readonly open: () => Promise<Database>;
  readonly clock: Clock;
  /** 0 ≤ random() < 1. Spreads the tries of many nodes. */
  readonly random: () => number;
  readonly onOpen: () => void;
  /** Whenever it is away for another kind of reason than before. */
  readonly onAway: (error: CatalogError) => void;
}

const WAIT_MS_MIN = 200;
const WAIT_MS_MAX = 5000;

type State =
  | { readonly kind: 'open'; readonly database: Database }
  /** The first try of an outage (O2). */
  | { readonly kind: 'opening'; readonly tried: Promise<unknown> }
  | { readonly kind: 'away'; readonly error: CatalogError };

const closed: CatalogError = { kind: 'catalog-closed', message: 'the catalog is closed' };

export class ReopeningDatabase implements Transactions {
  readonly firstTry: Promise<Result<void, CatalogError>>;
  readonly #options: ReopeningOptions;
  readonly #stop = new AbortController();
  /** Lost ones, until what they were running has ended. */
  readonly #closing = new Set<Promise<void>>();
  #state: State;
  #trying: Promise<void> = Promise.resolve();
  #reason: CatalogError['kind'] | undefined;

  /** Begins the first try. */
  constructor(options: ReopeningOptions) {
    this.#options = options;
    this.firstTry = this.#try();
    this.#state = { kind: 'opening', tried: this.firstTry };
    this.#trying = this.#untilOpen(this.firstTry);
  }

  get clock(): Clock {
    return this.#options.clock;
  }

  read<T>(name: string, work: (tx: Tx) => Promise<T>): Promise<T> {
    return this.#use((database) => database.read(name, work));
  }

  write<T>(name: string, work: (tx: Tx) => Promise<T>): Promise<T> {
    return this.#use((database) => database.write(name, work));
  }

  async freeReserve(): Promise<boolean> {
    return this.#state.kind === 'open' && (await this.#state.database.freeReserve());
  }

  async restoreReserve(): Promise<void> {
    if (this.#state.kind === 'open') await this.#state.database.restoreReserve();
  }

  /** Waits for a try under way and for what runs. Later calls fail as `catalog-closed`. */
  async close(): Promise<void> {
    const state = this.#state;
    this.#stop.abort();
    this.#state = { kind: 'away', error: closed };
    await this.#trying;
    if (state.kind === 'open') await state.database.close();
    await Promise.all(this.#closing);
  }

  /** Between looking and entering there is no await: nobody enters what is lost already. */
  async #use<T>(work: (database: Database) => Promise<T>): Promise<T> {
    for (;;) {
      const state = this.#state;
      if (state.kind === 'away') throw new Failure<CatalogError>(state.error);
      if (state.kind === 'open') return await this.#enter(state.database, work);
      await state.tried;
    }
  }

  async #enter<T>(database: Database, work: (database: Database) => Promise<T>): Promise<T> {
    try {
      return await work(database);
    } catch (error) {
      if (isLoss(error, database)) this.#lost(database);
      throw error;
    }
  }

  /** Many may find out at once that it is lost: the first one counts. */
  #lost(database: Database): void {
    if (this.#state.kind !== 'open' || this.#state.database !== database) return;
    const closing = database.close().catch(() => undefined);
    this.#closing.add(closing);
    void closing.then(() => this.#closing.delete(closing));
    const tried = this.#try();
    this.#state = { kind: 'opening', tried };
    this.#trying = this.#untilOpen(tried);
  }

  async #untilOpen(first: Promise<Result<void, CatalogError>>): Promise<void> {
    const { clock, random } = this.#options;
    const { signal } = this.#stop;
    let tried = await first;
    for (let waitMs = WAIT_MS_MIN; !tried.ok; waitMs = Math.min(waitMs * 2, WAIT_MS_MAX)) {
      await clock.sleep(waitMs * (1 - random() / 2), signal).catch(() => undefined);
      if (signal.aborted) return;
      tried = await this.#try();
    }
  }

  async #try(): Promise<Result<void, CatalogError>> {
    const { open, onOpen, onAway } = this.#options;
    try {
      const database = await open();
      if (this.#stop.signal.aborted) {
        await database.close();
        return err(closed);
      }
      this.#state = { kind: 'open', database };
      this.#reason = undefined;
      onOpen();
      return ok(undefined);
    } catch (thrown) {
      const error = errorOf(thrown);
      if (this.#stop.signal.aborted) return err(error);
      this.#state = { kind: 'away', error };
      if (error.kind !== this.#reason) onAway(error);
      this.#reason = error.kind;
      return err(error);
    }
  }
}

/**
 * A file on a file system that failed may answer with I/O errors for as long as it is open, even
 * once the file system is back. PostgreSQL's I/O errors are its server's affair.
 */
function isLoss(error: unknown, { port }: Database): boolean {
  const detail = error instanceof Failure ? (error.detail as FailureDetail) : undefined;
  if (detail?.kind === 'catalog-io') return port.name === 'sqlite';
  return detail?.kind === 'catalog-unavailable';
}

/** What is no failure of the database's own is an assumption of this program that does not hold. */
function errorOf(thrown: unknown): CatalogError {
  if (thrown instanceof Failure) return thrown.detail as CatalogError;
  return { kind: 'catalog-corrupt', message: `the catalog cannot be used: ${String(thrown)}` };
}

export interface ReopeningCatalog {
  readonly catalog: OpenCatalog<ReopeningDatabase>;
  readonly firstTry: FirstTry;
}

export interface NodeOptions extends Pick<ReopeningOptions, 'onOpen' | 'onAway'> {
  /** Registered whenever the catalog is opened. */
  readonly nodeId: NodeId;
  /** Its id is spent: the catalog refuses every call that names it, and answers the others. */
  readonly onForgotten: (refusal: NodeForgotten) => void;
}

/** Returns at once. Throws `Failure<CatalogError>` for a URL that names no catalog. */
export function reopeningCatalog(config: CatalogConfig, node: NodeOptions): ReopeningCatalog {
  const dialect = dialectOf(config.url);
  let forgotten: NodeForgotten | undefined;
  const open = async (): Promise<Database> => {
    const database = await openCurrent(config);
    try {
      forgotten = await register(database, node.nodeId);
    } catch (error) {
      await database.close();
      throw error;
    }
    if (forgotten !== undefined) node.onForgotten(forgotten);
    return database;
  };
  const database = new ReopeningDatabase({
    open,
    clock: config.clock ?? systemClock,
    random: config.random ?? Math.random,
    onOpen: node.onOpen,
    onAway: node.onAway,
  });
  const firstTry: FirstTry = database.firstTry.then((tried) =>
    forgotten === undefined || !tried.ok ? tried : err(forgotten),
  );
  return { catalog: catalogOn(database, dialect), firstTry };
}

/** A node that is known already writes nothing, and so waits for nobody's lock. */
async function register(database: Database, nodeId: NodeId): Promise<NodeForgotten | undefined> {
  const known = await database.read('find-node', (tx) => findNode(tx, nodeId));
  if (known?.forgottenAtMs === null) return undefined;
  try {
    await database.write('register-node', (tx) => registerNode(tx, nodeId, null));
    return undefined;
  } catch (error) {
    const detail = error instanceof Failure ? (error.detail as FailureDetail) : undefined;
    if (detail?.kind === 'node-forgotten') return detail as NodeForgotten;
    throw error;
  }
}
