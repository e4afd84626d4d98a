import { expect, test } from 'vitest';
import { BoundedQueue } from '../../src/pipeline/queue.ts';
import { buffer } from '../../src/pipeline/stage.ts';

const weightOf = (item: number): number => item;
const quiet = (): void => undefined;

async function collect<T>(input: AsyncIterable<T>): Promise<T[]> {
  const out: T[] = [];
  for await (const item of input) out.push(item);
  return out;
}

test('Q1: the waiting weight never exceeds the bound, and one item heavier than it is let in', async () => {
  const seen: number[] = [];
  const queue = new BoundedQueue<number>({ max: 10, weightOf, gauge: (w) => seen.push(w) });
  await queue.put(25);
  let entered = false;
  const second = queue.put(1).then(() => (entered = true));
  await Promise.resolve();
  expect(entered).toBe(false);
  expect(await queue.take()).toEqual({ done: false, item: 25 });
  await second;
  await queue.put(9);
  expect(Math.max(...seen.slice(1))).toBeLessThanOrEqual(10);
});

test('Q2: closing tells a waiting producer that its item was not taken', async () => {
  const queue = new BoundedQueue<number>({ max: 1, weightOf, gauge: quiet });
  await queue.put(1);
  const waiting = queue.put(1);
  queue.close();
  expect(await waiting).toBe(false);
  expect(await queue.put(1)).toBe(false);
});

test('Q3: a failure comes after the items before it', async () => {
  const queue = new BoundedQueue<number>({ max: 10, weightOf, gauge: quiet });
  await queue.put(1);
  queue.fail(new Error('source broke'));
  expect(await queue.take()).toEqual({ done: false, item: 1 });
  await expect(queue.take()).rejects.toThrow('source broke');
});

test('a buffer keeps order, bounds how far the producer runs ahead, and reports an empty queue at the end', async () => {
  let produced = 0;
  async function* source(): AsyncIterable<number> {
    for (let i = 0; i < 100; i++) {
      produced = i;
      await Promise.resolve();
      yield i;
    }
  }
  const depths: number[] = [];
  let ahead = 0;
  const options = { max: 4, weightOf: () => 1, gauge: (w: number) => depths.push(w) };
  const got: number[] = [];
  for await (const item of buffer(source(), options)) {
    ahead = Math.max(ahead, produced - item);
    got.push(item);
  }
  expect(got).toEqual(Array.from({ length: 100 }, (_, i) => i));
  expect(ahead).toBeLessThanOrEqual(6);
  expect(Math.max(...depths)).toBeLessThanOrEqual(4);
  expect(depths.at(-1)).toBe(0);
});

test('a consumer that stops early ends the producer before the buffer ends', async () => {
  let ended = false;
  async function* source(): AsyncIterable<number> {
    try {
      for (let i = 0; ; i++) {
        await Promise.resolve();
        yield i;
      }
    } finally {
      ended = true;
    }
  }
  for await (const item of buffer(source(), { max: 3, weightOf, gauge: quiet })) {
    if (item === 5) break;
  }
  expect(ended).toBe(true);
});

test('a failing producer fails the buffer with the same error', async () => {
  const broke = new Error('read failed');
  async function* source(): AsyncIterable<number> {
    await Promise.resolve();
    yield 1;
    throw broke;
  }
  const all = collect(buffer(source(), { max: 3, weightOf, gauge: quiet }));
  await expect(all).rejects.toBe(broke);
});

test('a buffer that is held back ends when its producer fails', async () => {
  const broke = new Error('the dirty set could not be read');
  async function* source(): AsyncIterable<number> {
    await Promise.resolve();
    if (broke.message !== '') throw broke;
    yield 1;
  }
  const holdUntil = new Promise<void>(() => undefined);
  const all = collect(
    buffer(source(), { max: 3, weightOf, gauge: quiet, holdUntil: () => holdUntil }),
  );
  await expect(all).rejects.toBe(broke);
});

test('a buffer that is held back hands nothing on, and fills up to its bound', async () => {
  let produced = 0;
  let release: () => void = () => undefined;
  const holdUntil = new Promise<void>((resolve) => (release = resolve));
  let full: () => void = () => undefined;
  const filled = new Promise<void>((resolve) => (full = resolve));
  async function* source(): AsyncIterable<number> {
    for (let i = 0; i < 6; i++) {
      await Promise.resolve();
      produced += 1;
      yield i;
    }
  }
  const gauge = (weight: number): void => (weight === 3 ? full() : undefined);
  const got: number[] = [];
  const consumer = (async () => {
    const options = { max: 3, weightOf: () => 1, gauge, holdUntil: () => holdUntil };
    for await (const item of buffer(source(), options)) got.push(item);
  })();
  await filled;
  expect(got).toEqual([]);
  expect(produced).toBeLessThanOrEqual(4);
  release();
  await consumer;
  expect(got).toEqual([0, 1, 2, 3, 4, 5]);
});

test('a buffer that is held back stays so when its producer has ended', async () => {
  let release: () => void = () => undefined;
  const holdUntil = new Promise<void>((resolve) => (release = resolve));
  let ended: () => void = () => undefined;
  const producerEnded = new Promise<void>((resolve) => (ended = resolve));
  async function* source(): AsyncIterable<number> {
    await Promise.resolve();
    yield 7;
    ended();
  }
  const got: number[] = [];
  const consumer = (async () => {
    const options = { max: 3, weightOf: () => 1, gauge: quiet, holdUntil: () => holdUntil };
    for await (const item of buffer(source(), options)) got.push(item);
  })();
  await producerEnded;
  // Everything that could be handed on without `release` would be within a turn.
  await new Promise((resolve) => setImmediate(resolve));
  expect(got).toEqual([]);
  release();
  await consumer;
  expect(got).toEqual([7]);
});

test('a buffer that begins to be held back while it waits for an item hands that one not on', async () => {
  let hold: Promise<void> | null = null;
  let release: () => void = () => undefined;
  let go: () => void = () => undefined;
  const second = new Promise<void>((resolve) => (go = resolve));
  async function* source(): AsyncIterable<number> {
    await Promise.resolve();
    yield 1;
    await second;
    yield 2;
  }
  const got: number[] = [];
  const options = { max: 3, weightOf: () => 1, gauge: quiet, holdUntil: () => hold };
  const consumer = (async () => {
    for await (const item of buffer(source(), options)) got.push(item);
  })();
  while (got.length === 0) await new Promise((resolve) => setImmediate(resolve));
  hold = new Promise<void>((resolve) => (release = resolve));
  go();
  await new Promise((resolve) => setImmediate(resolve));
  expect(got).toEqual([1]);
  release();
  hold = null;
  await consumer;
  expect(got).toEqual([1, 2]);
});
