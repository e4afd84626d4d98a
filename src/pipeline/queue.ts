/**
 * A queue with a bound, between one producer and one consumer.
 *
 * Q1: the weight of waiting items never exceeds `max`, except that a single item is always let in.
 * Q2: after `close`, `put` answers false and nothing waits.
 * Q3: a failure is delivered after the items that preceded it.
 */

/** Told the weight waiting in the queue after each change. */
export type QueueGauge = (weight: number) => void;

export type Taken<T> =
  { readonly done: false; readonly item: T } | { readonly done: true; readonly item?: undefined };

type Ending = { readonly kind: 'ended' } | { readonly kind: 'failed'; readonly error: unknown };

export class BoundedQueue<T> {
  readonly #max: number;
  readonly #weightOf: (item: T) => number;
  readonly #gauge: QueueGauge;
  readonly #items: T[] = [];
  #weight = 0;
  #ending: Ending | undefined;
  #closed = false;
  #wakeProducer: (() => void) | undefined;
  #wakeConsumer: (() => void) | undefined;

  constructor(options: {
    readonly max: number;
    readonly weightOf: (item: T) => number;
    readonly gauge: QueueGauge;
  }) {
    this.#max = options.max;
    this.#weightOf = options.weightOf;
    this.#gauge = options.gauge;
  }

  /** Waits for room. False: the consumer is gone, and the item was not taken. */
  async put(item: T): Promise<boolean> {
    const weight = this.#weightOf(item);
    while (!this.#closed && this.#items.length > 0 && this.#weight + weight > this.#max) {
      await new Promise<void>((resolve) => (this.#wakeProducer = resolve));
    }
    if (this.#closed) return false;
    this.#items.push(item);
    this.#add(weight);
    this.#wake();
    return true;
  }

  /** The next item, or the end. Throws the producer's failure. */
  async take(): Promise<Taken<T>> {
    while (this.#items.length === 0) {
      if (this.#ending?.kind === 'failed') throw this.#ending.error;
      if (this.#ending !== undefined || this.#closed) return { done: true };
      await new Promise<void>((resolve) => (this.#wakeConsumer = resolve));
    }
    const item = this.#items.shift() as T;
    this.#add(-this.#weightOf(item));
    this.#wake();
    return { done: false, item };
  }

  end(): void {
    this.#ending ??= { kind: 'ended' };
    this.#wake();
  }

  fail(error: unknown): void {
    this.#ending ??= { kind: 'failed', error };
    this.#wake();
  }

  /** The consumer is done: waiting items are dropped, a waiting producer is told. */
  close(): void {
    this.#closed = true;
    this.#items.length = 0;
    this.#add(-this.#weight);
    this.#wake();
  }

  #add(weight: number): void {
    this.#weight += weight;
    this.#gauge(this.#weight);
  }

  #wake(): void {
    this.#wakeProducer?.();
    this.#wakeConsumer?.();
    this.#wakeProducer = undefined;
    this.#wakeConsumer = undefined;
  }
}
