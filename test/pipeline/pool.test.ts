import { expect, test } from 'vitest';
import { WorkerPool, type WorkerOperation } from '../../src/pipeline/pool.ts';

const workerFile = new URL('./turn-worker.mjs', import.meta.url).href;
const order: WorkerOperation<{ name: string }, { name: string; place: number }> = { name: 'order' };
const untilCancelled: WorkerOperation<{ startedSlot: number; cancelSlot: number }, string> = {
  name: 'untilCancelled',
};
const broken: WorkerOperation<null, never> = { name: 'broken' };

function makePool(threads: number): { pool: WorkerPool; words: Int32Array; depths: number[] } {
  const cancelWords = new SharedArrayBuffer(64);
  const arena = new SharedArrayBuffer(4096);
  const setup = { arena, cancelWords, compressedArena: null, compressedSlabBytes: 0 };
  const depths: number[] = [];
  const pool = new WorkerPool({ threads, workerFile, setup, gauge: (d) => depths.push(d) });
  return { pool, words: new Int32Array(cancelWords), depths };
}

test('W1: a capture with three tasks is done long before one with two hundred', async () => {
  const { pool, depths } = makePool(1);
  await using open = pool;
  void open;
  const huge = pool.client();
  const small = pool.client();
  const hugeRuns = Array.from({ length: 200 }, () => huge.run(order, { name: 'huge' }));
  const smallRuns = [1, 2, 3].map(() => small.run(order, { name: 'small' }));
  const places = (await Promise.all(smallRuns)).map((value) => value.place);
  await Promise.all(hugeRuns);
  expect(Math.max(...places)).toBeLessThan(12);
  expect(Math.max(...depths)).toBeLessThanOrEqual(203);
  expect(depths.at(-1)).toBe(0);
});

test('W2: two tasks a thread are handed on, and four of an operation that is short', async () => {
  const short: WorkerOperation<{ startedSlot: number; cancelSlot: number }, string> = {
    ...untilCancelled,
    short: true,
  };
  for (const [operation, waiting] of [
    [untilCancelled, 4],
    [short, 2],
  ] as const) {
    const { pool, words, depths } = makePool(1);
    await using open = pool;
    void open;
    const client = pool.client();
    const task = { startedSlot: 2, cancelSlot: 3 };
    const runs = Array.from({ length: 6 }, () => client.run(operation, task));
    expect(depths.at(-1)).toBe(waiting);
    Atomics.store(words, 3, 1);
    Atomics.notify(words, 3);
    await Promise.all(runs);
  }
});

test('W3: closing refuses queued tasks at once, and settled waits for the running one', async () => {
  const { pool, words } = makePool(1);
  await using open = pool;
  void open;
  const client = pool.client();
  const running = client.run(untilCancelled, { startedSlot: 2, cancelSlot: 3 });
  const started = Atomics.waitAsync(words, 2, 0);
  if (started.async) await started.value;
  const queued = [1, 2, 3, 4].map(() => client.run(order, { name: 'late' }));
  const outcomes = Promise.allSettled(queued);
  client.close(new Error('aborted'));
  let settled = false;
  const settling = client.settled().then(() => (settled = true));
  await expect(client.run(order, { name: 'later' })).rejects.toThrow('aborted');
  expect(settled).toBe(false);
  Atomics.store(words, 3, 1);
  Atomics.notify(words, 3);
  expect(await running).toBe('stopped');
  await settling;
  const refused = (await outcomes).filter((outcome) => outcome.status === 'rejected');
  expect(refused.length).toBeGreaterThanOrEqual(3);
});

test('an operation that throws rejects its own call, and the pool goes on', async () => {
  const { pool } = makePool(1);
  await using open = pool;
  void open;
  const client = pool.client();
  await expect(client.run(broken, null)).rejects.toThrow('a bug in an operation');
  expect((await client.run(order, { name: 'next' })).name).toBe('next');
});
