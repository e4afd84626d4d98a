import { expect, test } from 'vitest';
import { SlabArena, type Slab } from '../../src/pipeline/slabs.ts';

function arena(slabs: number): SlabArena {
  const quiet = (): void => undefined;
  return new SlabArena({ budgetBytes: slabs * 4096, slabBytes: 4096, touch: quiet, gauge: quiet });
}

test('S1: slabs do not overlap, and all come back', async () => {
  const pool = arena(4);
  const holder = pool.holder();
  const slabs = await Promise.all([1, 2, 3, 4].map(() => holder.acquire()));
  expect(new Set(slabs.map((slab) => slab.offset)).size).toBe(4);
  expect(slabs.every((slab) => slab.view.length === 4096)).toBe(true);
  holder.releaseAll();
  expect(pool.freeCount).toBe(4);
});

test('S1: releasing a slab twice, or another holder’s, is a bug that crashes', async () => {
  const pool = arena(2);
  const holder = pool.holder();
  const slab = await holder.acquire();
  expect(() => pool.holder().release(slab)).toThrow('released by its holder');
  holder.release(slab);
  expect(() => holder.release(slab)).toThrow('released by its holder');
});

test('S2: a small capture gets its slab before a huge one that waits longer gets another', async () => {
  const pool = arena(4);
  const huge = pool.holder();
  const held = await Promise.all([1, 2, 3, 4].map(() => huge.acquire()));
  const order: string[] = [];
  const more = [1, 2, 3].map(() => huge.acquire().then(() => order.push('huge')));
  const small = pool.holder();
  const first = small.acquire().then(() => order.push('small'));
  const second = small.acquire().then(() => order.push('small'));
  for (const slab of held) huge.release(slab);
  await Promise.all([first, second, ...more.slice(0, 2)]);
  expect(order.slice(0, 2)).toEqual(['small', 'small']);
});

test('S3: closing a holder refuses what it waits for and leaves others waiting', async () => {
  const pool = arena(2);
  const holder = pool.holder();
  const held: Slab[] = [await holder.acquire(), await holder.acquire()];
  const other = pool.holder();
  const mine = holder.acquire();
  const theirs = other.acquire();
  holder.close(new Error('aborted'));
  await expect(mine).rejects.toThrow('aborted');
  await expect(holder.acquire()).rejects.toThrow('aborted');
  expect(held).toHaveLength(2);
  holder.releaseAll();
  expect((await theirs).view.length).toBe(4096);
});

test('a holder tells each time that it runs short, and when it is closed', async () => {
  const pool = arena(2);
  const holder = pool.holder();
  const [one] = await Promise.all([holder.acquire(), holder.acquire()]);
  const short = holder.runsShort();
  const more = holder.acquire();
  await short;
  holder.release(one);
  await more;
  let again = false;
  const second = holder.runsShort().then(() => (again = true));
  await new Promise((resolve) => setImmediate(resolve));
  expect(again).toBe(false);
  const refused = holder.acquire();
  refused.catch(() => undefined);
  await second;
  const third = holder.runsShort();
  holder.close(new Error('over'));
  await third;
  await holder.runsShort();
  await expect(refused).rejects.toThrow('over');
});
