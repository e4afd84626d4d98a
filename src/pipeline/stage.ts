/**
 * What a stage is: a named transformation of one stream of items into another. A stage pulls its
 * input, so the slowest one sets the pace; it throws `Failure` for what may happen and anything
 * else for a bug; it holds nothing when its generator has ended.
 */
import type { StageName } from '../stage-names.ts';
import { BoundedQueue, type QueueGauge } from './queue.ts';
import type { StageMeter } from './meter.ts';

export interface StageContext {
  readonly signal: AbortSignal;
  readonly meter: StageMeter;
  /** Told at once of an item that failed, where an earlier stage may wait for what comes of it. */
  readonly failed?: ((error: unknown) => void) | undefined;
}

export interface Stage<In, Out> {
  readonly name: StageName;
  run(input: AsyncIterable<In>, context: StageContext): AsyncIterable<Out>;
}

/** A stream of exactly one item. */
export async function* one<T>(item: T): AsyncIterable<T> {
  await Promise.resolve();
  yield item;
}

export interface BufferOptions<T> {
  /** Most weight that may wait between the two stages; one item always fits. */
  readonly max: number;
  readonly weightOf: (item: T) => number;
  readonly gauge: QueueGauge;
  /**
   * Asked before each item: nothing is handed on until what it answers resolves, and the producer
   * fills the queue meanwhile. Null: nothing to wait for.
   */
  readonly holdUntil?: (() => Promise<void> | null) | undefined;
}

/**
 * Lets the producer of `source` run ahead of its consumer by at most `max`. When the consumer stops
 * early, or either side fails, the producer's generator has ended before this one does.
 */
export async function* buffer<T>(
  source: AsyncIterable<T>,
  options: BufferOptions<T>,
): AsyncIterable<T> {
  const queue = new BoundedQueue<T>(options);
  const producer = fill(queue, source);
  try {
    // A producer that failed has nothing more to hold back for.
    const failed = new Promise<void>((resolve) => {
      void producer.then((outcome) => outcome === 'failed' && resolve());
    });
    const held = async (): Promise<void> => {
      const until = options.holdUntil?.() ?? null;
      if (until !== null) await Promise.race([until, failed]);
    };
    for (;;) {
      await held();
      const next = await queue.take();
      if (next.done) return;
      // It may have begun while this waited for an item.
      await held();
      yield next.item;
    }
  } finally {
    queue.close();
    await producer;
  }
}

async function fill<T>(
  queue: BoundedQueue<T>,
  source: AsyncIterable<T>,
): Promise<'ended' | 'failed'> {
  try {
    for await (const item of source) {
      if (!(await queue.put(item))) return 'ended';
    }
    queue.end();
    return 'ended';
  } catch (error) {
    queue.fail(error);
    return 'failed';
  }
}
