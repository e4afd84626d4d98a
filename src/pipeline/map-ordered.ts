/**
 * The one place where a stage works on several items at once.
 *
 * M1: at most `inFlightMax` calls of `work` run, or wait to be taken, at any time.
 * M2: results come in the order of the input.
 * M3: when it ends, by success, failure or a consumer that stops, no call of `work` is still
 *     running, and the input has ended.
 * M4: a finished result is offered while the input is still waiting for its next item: what the
 *     result holds (a slab, say) may be what the input waits for.
 */
import { BoundedQueue } from './queue.ts';

export interface MapOptions {
  readonly inFlightMax: number;
  readonly signal: AbortSignal;
  /**
   * Told of each call of `work` that failed, at once. M3 waits for the input to end: an input that
   * waits for what came of its items must be told that nothing will.
   */
  readonly failed?: ((error: unknown) => void) | undefined;
}

interface Call<Out> {
  readonly result: Promise<Out>;
}

export async function* mapOrdered<In, Out>(
  input: AsyncIterable<In>,
  options: MapOptions,
  work: (item: In) => Promise<Out>,
): AsyncIterable<Out> {
  const { signal, inFlightMax } = options;
  const calls = new BoundedQueue<Call<Out>>({
    max: Number.MAX_SAFE_INTEGER,
    weightOf: () => 1,
    gauge: () => undefined,
  });
  const room = new Room(inFlightMax);
  const running = new Set<Promise<unknown>>();
  const start = (item: In): Promise<boolean> => {
    const result = work(item);
    running.add(result);
    // A failure is seen in order, at the head; until then it must not count as unhandled.
    result.catch((error: unknown) => options.failed?.(error)).finally(() => running.delete(result));
    return calls.put({ result });
  };
  const producer = produce(input, { signal, room, calls, start });
  try {
    for (;;) {
      const next = await calls.take();
      if (next.done) break;
      const value = await next.item.result;
      room.leave();
      yield value;
    }
    signal.throwIfAborted();
  } finally {
    calls.close();
    room.close();
    await producer;
    await Promise.allSettled(running);
  }
}

async function produce<In, Out>(
  input: AsyncIterable<In>,
  o: {
    readonly signal: AbortSignal;
    readonly room: Room;
    readonly calls: BoundedQueue<Call<Out>>;
    readonly start: (item: In) => Promise<boolean>;
  },
): Promise<void> {
  try {
    if (!(await o.room.enter())) return;
    for await (const item of input) {
      o.signal.throwIfAborted();
      if (!(await o.start(item))) return;
      if (!(await o.room.enter())) return;
    }
    o.calls.end();
  } catch (error) {
    o.calls.fail(error);
  }
}

/** Room for a number of calls, for one that enters and one that leaves. */
class Room {
  #free: number;
  #closed = false;
  #wake: (() => void) | undefined;

  constructor(places: number) {
    this.#free = places;
  }

  /** False once closed. */
  async enter(): Promise<boolean> {
    while (this.#free === 0 && !this.#closed) {
      await new Promise<void>((resolve) => (this.#wake = resolve));
    }
    this.#free -= 1;
    return !this.#closed;
  }

  leave(): void {
    this.#free += 1;
    this.#wake?.();
  }

  close(): void {
    this.#closed = true;
    this.#wake?.();
  }
}
