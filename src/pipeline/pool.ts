/**
 * The worker pool that all captures share. Piscina runs the threads; this decides whose turn it is.
 *
 * W1: tasks of several captures take turns, one each, whatever the length of their queues.
 * W2: at most two tasks a thread are handed to Piscina, four where they are short, so that its own
 *     queue never decides the order. What waits in a thread's port keeps it busy while this thread
 *     is not there to feed it, in a flush of the ledger say.
 * W3: a closed client's queued tasks are refused at once; `settled` resolves when its running ones
 *     have ended.
 * W4: cancelling never kills a thread: native loops poll the client's cancel word. Piscina's own
 *     signal kills the thread, so it is not used.
 */
import { Piscina } from 'piscina';
import type { QueueGauge } from './queue.ts';
import type { WorkerSetup } from './worker-setup.ts';

const IN_FLIGHT_PER_THREAD = 2;
const SHORT_IN_FLIGHT_PER_THREAD = 4;

interface Queued {
  readonly operation: string;
  readonly short: boolean;
  readonly task: unknown;
  readonly resolve: (value: unknown) => void;
  readonly reject: (error: unknown) => void;
}

export interface WorkerPoolOptions {
  readonly threads: number;
  /** The compiled module whose exports are the operations. */
  readonly workerFile: string;
  readonly setup: WorkerSetup;
  readonly gauge: QueueGauge;
}

export class WorkerPool implements AsyncDisposable {
  readonly #piscina: Piscina;
  readonly #clients: PoolClient[] = [];
  readonly #threads: number;
  readonly #gauge: QueueGauge;
  #inFlight = 0;
  #queued = 0;

  constructor(options: WorkerPoolOptions) {
    this.#gauge = options.gauge;
    this.#threads = options.threads;
    this.#piscina = new Piscina({
      filename: options.workerFile,
      minThreads: options.threads,
      maxThreads: options.threads,
      // They wait in the thread's own port: no round trip through this thread between two tasks.
      concurrentTasksPerWorker: SHORT_IN_FLIGHT_PER_THREAD,
      workerData: options.setup,
      atomics: 'sync',
    });
  }

  client(): PoolClient {
    const client = new PoolClient(this);
    this.#clients.push(client);
    return client;
  }

  /** @internal Called by clients. */
  queuedChanged(delta: number): void {
    this.#queued += delta;
    this.#gauge(this.#queued);
    this.#dispatch();
  }

  /** @internal Called by clients. */
  remove(client: PoolClient): void {
    const at = this.#clients.indexOf(client);
    if (at >= 0) this.#clients.splice(at, 1);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.#piscina.destroy();
  }

  #dispatch(): void {
    for (;;) {
      const client = this.#clients.find((candidate) => this.#hasRoomFor(candidate.first));
      if (client === undefined) break;
      this.remove(client);
      this.#clients.push(client);
      const queued = client.next();
      this.#queued -= 1;
      this.#inFlight += 1;
      this.#piscina
        .run(queued.task, { name: queued.operation })
        .then(queued.resolve, queued.reject)
        .finally(() => {
          this.#inFlight -= 1;
          client.ended();
          this.#dispatch();
        });
    }
    this.#gauge(this.#queued);
  }

  #hasRoomFor(queued: Queued | undefined): boolean {
    if (queued === undefined) return false;
    const each = queued.short ? SHORT_IN_FLIGHT_PER_THREAD : IN_FLIGHT_PER_THREAD;
    return this.#inFlight < this.#threads * each;
  }
}

/** One capture's access to the pool. */
export class PoolClient {
  readonly #pool: WorkerPool;
  readonly #queue: Queued[] = [];
  readonly #onIdle: (() => void)[] = [];
  #running = 0;
  #closedBy: Error | undefined;

  constructor(pool: WorkerPool) {
    this.#pool = pool;
  }

  /** @internal The task that is next. */
  get first(): Queued | undefined {
    return this.#queue[0];
  }

  /**
   * Runs one worker operation. Rejects when the client is closed, and with what the worker threw: a
   * bug, since expected failures are part of an operation's result.
   */
  run<Task, Value>(operation: WorkerOperation<Task, Value>, task: Task): Promise<Value> {
    if (this.#closedBy !== undefined) return Promise.reject(this.#closedBy);
    return new Promise((resolve, reject) => {
      this.#queue.push({
        operation: operation.name,
        short: operation.short === true,
        task,
        resolve: (value) => resolve(value as Value),
        reject,
      });
      this.#pool.queuedChanged(1);
    });
  }

  /** Refuses queued and later tasks. */
  close(reason: Error): void {
    this.#closedBy ??= reason;
    const dropped = this.#queue.splice(0);
    for (const queued of dropped) queued.reject(this.#closedBy);
    if (dropped.length > 0) this.#pool.queuedChanged(-dropped.length);
    if (this.#running === 0) this.#pool.remove(this);
  }

  /** Resolves when no task of this client runs. */
  settled(): Promise<void> {
    if (this.#running === 0 && this.#queue.length === 0) return Promise.resolve();
    return new Promise((resolve) => this.#onIdle.push(resolve));
  }

  /** @internal Called by the pool. */
  next(): Queued {
    this.#running += 1;
    return this.#queue.shift() as Queued;
  }

  /** @internal Called by the pool. */
  ended(): void {
    this.#running -= 1;
    if (this.#running > 0 || this.#queue.length > 0) return;
    if (this.#closedBy !== undefined) this.#pool.remove(this);
    for (const wake of this.#onIdle.splice(0)) wake();
  }
}

/** Names a function that the worker file exports, with the types of its task and value. */
export interface WorkerOperation<Task, Value> {
  readonly name: string;
  /** A task takes about a millisecond, so that a few more may wait in a thread's port. */
  readonly short?: boolean;
  /** Types only; never set. */
  readonly types?: { readonly task: Task; readonly value: Value };
}

/**
 * Where the compiled form of a source file is. Threads run compiled code, also when tests run the
 * sources.
 * @param from the caller's `import.meta.url`; @param name a sibling, with its `.ts` ending
 */
export function compiledSibling(from: string, name: string): string {
  const sibling = new URL(name, from).href;
  if (from.endsWith('.js')) return sibling.replace(/\.ts$/, '.js');
  return sibling.replace(/\/src\/(?!.*\/src\/)/, '/dist/src/').replace(/\.ts$/, '.js');
}
