/**
 * What all captures of the daemon share: slabs, worker threads, cancel words and the gates of the
 * stages. Allocated once at start; a capture takes a seat and gives it back.
 */
import type { Config } from '../config/schema.ts';
import { prefault } from '../native/guest.ts';
import { CancelWords, type CancelWord } from '../pipeline/cancel.ts';
import { Gate } from '../pipeline/gate.ts';
import { WorkerPool, type PoolClient } from '../pipeline/pool.ts';
import { SlabArena, type SlabHolder } from '../pipeline/slabs.ts';
import { Failure } from '../result.ts';
import { workerFile } from '../stages/operations.ts';
import type { Gauges } from './observer.ts';

export const gatedStages = ['pause', 'dirty-bitmap', 'commit', 'publish', 'resume'] as const;
export type GatedStage = (typeof gatedStages)[number];

/**
 * Room in a slab for compressed blocks of a batch that does not compress: 1/32 and a block more.
 */
const compressedSlack = (slabBytes: number): number => slabBytes / 32 + 65_536;

/** Compressed slabs are only held between compact and commit. */
const compressedShare = 1 / 4;

/** One capture's part of what is shared. */
export interface Seat {
  readonly slabs: SlabHolder;
  readonly compressedSlabs: SlabHolder | null;
  readonly pool: PoolClient;
  readonly cancel: CancelWord;
  /**
   * Stops everything of this capture that waits or runs; running native calls end within their
   * slice.
   */
  abort(reason: Error): void;
  /** Waits for what still runs, then gives everything back. */
  leave(): Promise<void>;
}

export class Engine implements AsyncDisposable {
  readonly #config: Config;
  readonly #arena: SlabArena;
  readonly #compressedArena: SlabArena | null;
  readonly #cancelWords: CancelWords;
  readonly #pool: WorkerPool;
  readonly #gates: ReadonlyMap<GatedStage, Gate>;

  constructor(config: Config, gauges: Gauges) {
    const { pipeline, memorySnapshot, capture } = config;
    this.#config = config;
    const compressed = memorySnapshot.compression !== 'none';
    const compressedBudget = compressed ? pipeline.slabBudget * compressedShare : 0;
    this.#arena = new SlabArena({
      budgetBytes: pipeline.slabBudget - compressedBudget,
      slabBytes: pipeline.slabBytes,
      touch: prefault,
      gauge: gauges.slabBytes,
    });
    this.#compressedArena = compressed
      ? new SlabArena({
          budgetBytes: compressedBudget,
          slabBytes: pipeline.slabBytes + compressedSlack(pipeline.slabBytes),
          touch: prefault,
          gauge: () => undefined,
        })
      : null;
    this.#cancelWords = new CancelWords(capture.inFlightMax);
    this.#pool = new WorkerPool({
      threads: pipeline.workers,
      workerFile,
      setup: {
        arena: this.#arena.buffer,
        compressedArena: this.#compressedArena?.buffer ?? null,
        compressedSlabBytes: this.#compressedArena?.slabBytes ?? 0,
        cancelWords: this.#cancelWords.words.buffer,
      },
      gauge: gauges.queue('pool'),
    });
    const gate = (name: GatedStage, of: { concurrency: number; queueMax: number }): Gate =>
      new Gate({
        name,
        concurrency: of.concurrency,
        waitingMax: of.queueMax,
        gauge: gauges.queue(name),
      });
    this.#gates = new Map([
      ['pause', gate('pause', pipeline.pause)],
      ['dirty-bitmap', gate('dirty-bitmap', pipeline.dirtyBitmap)],
      ['commit', gate('commit', pipeline.commit)],
      ['publish', gate('publish', pipeline.publish)],
      ['resume', gate('resume', pipeline.resume)],
    ]);
  }

  get slabBytes(): number {
    return this.#arena.slabBytes;
  }

  /** Waits for a place in a stage; dispose it to leave. */
  enter(stage: GatedStage, signal: AbortSignal): Promise<Disposable> {
    const gate = this.#gates.get(stage);
    if (gate === undefined) throw new Error(`no gate ${stage}`);
    return gate.enter(signal);
  }

  /** Fails with `busy` when `capture.in_flight_max` captures are unfinished. */
  seat(): Seat {
    const cancel = this.#cancelWords.take();
    if (cancel === undefined) {
      const most = this.#config.capture.inFlightMax;
      const message = `${most} captures are unfinished already (capture.in_flight_max)`;
      throw new Failure({ kind: 'busy', message });
    }
    const slabs = this.#arena.holder();
    const compressedSlabs = this.#compressedArena?.holder() ?? null;
    const pool = this.#pool.client();
    const close = (reason: Error): void => {
      slabs.close(reason);
      compressedSlabs?.close(reason);
      pool.close(reason);
    };
    return {
      slabs,
      compressedSlabs,
      pool,
      cancel,
      abort(reason) {
        cancel.set();
        close(reason);
      },
      async leave() {
        close(new Error('the capture has ended'));
        await pool.settled();
        slabs.releaseAll();
        compressedSlabs?.releaseAll();
        cancel.free();
      },
    };
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.#pool[Symbol.asyncDispose]();
  }
}
