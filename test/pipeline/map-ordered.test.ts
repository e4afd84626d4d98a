import { expect, test } from 'vitest';
import { InFlight } from '../../src/pipeline/in-flight.ts';
import { mapOrdered } from '../../src/pipeline/map-ordered.ts';
import { one } from '../../src/pipeline/stage.ts';

async function* numbers(count: number): AsyncIterable<number> {
  for (let i = 0; i < count; i++) {
    await Promise.resolve();
    yield i;
  }
}

/** Resolves after a number of microtask turns that differs between items. */
async function turns(count: number): Promise<void> {
  for (let i = 0; i < count; i++) await Promise.resolve();
}

test('M1, M2: results keep the order of the input while inFlightMax calls run, never more', async () => {
  let running = 0;
  let most = 0;
  let open: () => void = () => undefined;
  const fourRun = new Promise<void>((resolve) => (open = resolve));
  const signal = new AbortController().signal;
  const got: number[] = [];
  const mapped = mapOrdered(numbers(50), { inFlightMax: 4, signal }, async (item) => {
    most = Math.max(most, ++running);
    if (running === 4) open();
    await fourRun;
    await turns((item * 7) % 11);
    running -= 1;
    return item * 2;
  });
  for await (const value of mapped) got.push(value);
  expect(got).toEqual(Array.from({ length: 50 }, (_, i) => i * 2));
  expect(most).toBe(4);
});

test('M3: after a failure no call is still running', async () => {
  let running = 0;
  const signal = new AbortController().signal;
  const mapped = mapOrdered(numbers(50), { inFlightMax: 8, signal }, async (item) => {
    running += 1;
    await turns(item === 3 ? 1 : 40);
    running -= 1;
    if (item === 3) throw new Error('batch 3');
    return item;
  });
  const all = (async () => {
    for await (const value of mapped) void value;
  })();
  await expect(all).rejects.toThrow('batch 3');
  expect(running).toBe(0);
});

test('an abort ends the stream with its reason, also when it comes with the last item', async () => {
  const controller = new AbortController();
  const reason = new Error('cancelled');
  const mapped = mapOrdered(one(1), { inFlightMax: 2, signal: controller.signal }, (item) => {
    controller.abort(reason);
    return Promise.resolve(item);
  });
  const all = (async () => {
    for await (const value of mapped) void value;
  })();
  await expect(all).rejects.toBe(reason);
});

test('M4: a finished result is offered while the input waits for what it holds', async () => {
  let free = 1;
  let onFree: (() => void) | undefined;
  async function* needsRoom(): AsyncIterable<number> {
    for (let i = 0; i < 5; i++) {
      while (free === 0) await new Promise<void>((resolve) => (onFree = resolve));
      free -= 1;
      yield i;
    }
  }
  const signal = new AbortController().signal;
  const got: number[] = [];
  const mapped = mapOrdered(needsRoom(), { inFlightMax: 4, signal }, (item) =>
    Promise.resolve(item),
  );
  for await (const value of mapped) {
    got.push(value);
    free += 1;
    onFree?.();
  }
  expect(got).toEqual([0, 1, 2, 3, 4]);
});

test('M3: a consumer that stops ends the input', async () => {
  let ended = false;
  async function* endless(): AsyncIterable<number> {
    try {
      for (let i = 0; ; i++) {
        await Promise.resolve();
        yield i;
      }
    } finally {
      ended = true;
    }
  }
  const signal = new AbortController().signal;
  const mapped = mapOrdered(endless(), { inFlightMax: 3, signal }, (item) => Promise.resolve(item));
  for await (const value of mapped) if (value === 7) break;
  expect(ended).toBe(true);
});

test('M3: an input that waits for what comes of its items is told of a failure at once', async () => {
  const broke = new Error('an item broke');
  const inFlight = new InFlight();
  const signal = new AbortController().signal;
  let after: unknown;
  async function* waits(): AsyncIterable<number> {
    inFlight.sent();
    yield 1;
    await inFlight.drained(signal).catch((error: unknown) => (after = error));
  }
  const failed = (error: unknown): void => inFlight.fail(error);
  const mapped = mapOrdered(waits(), { inFlightMax: 2, signal, failed }, () =>
    Promise.reject<number>(broke),
  );
  const drain = async (): Promise<void> => {
    for await (const value of mapped) void value;
  };
  await expect(drain()).rejects.toBe(broke);
  expect(after).toBe(broke);
});
