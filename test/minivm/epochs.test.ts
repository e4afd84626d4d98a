import { describe, expect, test } from 'vitest';
import { statSync } from 'node:fs';
import { launchMiniVm, type MiniVm } from '../../src/minivm/launch.ts';
import { bitsOf, dirtyPages, fault, guests, rangesOf, TempFolder } from './helpers.ts';

const removed = (vm: MiniVm): Promise<number[]> => rangesOf(vm, '/vm/removed-memory-ranges');
const options = { memoryMib: 16, dirtyEpochs: true } as const;

describe.each(guests)('removal and epochs of a %s guest', (backend) => {
  test('a removed page reads zero, is reported, and leaves the set when written', async () => {
    await using vm = await launchMiniVm({ ...options, backend, dialect: 'aenv' });
    await vm.run({ pages: { firstPage: 0, pageCount: 20 } });
    await vm.removePages({ firstPage: 4, pageCount: 8 });
    expect(await removed(vm)).toEqual([4, 5, 6, 7, 8, 9, 10, 11]);
    expect((await vm.readBytes(4 * 4096, 8 * 4096)).every((byte) => byte === 0)).toBe(true);
    await vm.run({ pages: { pages: [5] } });
    await vm.deviceWrites({ pages: { pages: [6] } });
    await vm.run({ pages: { pages: [7] }, fill: 'read' });
    expect(await removed(vm)).toEqual([4, 7, 8, 9, 10, 11]);
  });

  test('a removed page of a restored guest reads zero, not the file’s bytes', async () => {
    using folder = new TempFolder();
    const [snapshotPath, memFilePath] = [folder.file('state'), folder.file('mem')];
    await using vm = await launchMiniVm({ backend, memoryMib: 16 });
    await vm.run({ pages: { firstPage: 0, pageCount: 20 } });
    await vm.pause();
    await vm.createSnapshot({ type: 'Full', snapshotPath, memFilePath });
    const restore = { snapshotPath, memoryPath: memFilePath };
    await using copy = await launchMiniVm({ backend, dirtyEpochs: true, restore });
    await copy.removePages({ firstPage: 3, pageCount: 2 });
    expect((await copy.readBytes(3 * 4096, 2 * 4096)).every((byte) => byte === 0)).toBe(true);
    expect(await removed(copy)).toEqual([3, 4]);
  });

  test.each(['aenv', 'e2b'] as const)('%s answers the open epoch’s set', async (dialect) => {
    await using vm = await launchMiniVm({ ...options, backend, dialect });
    await vm.run({ pages: { pages: [1, 2] } });
    await vm.removePages({ firstPage: 9, pageCount: 1 });
    await vm.pause();
    expect(await vm.epoch('begin')).toEqual({ epoch: 0, open: true });
    await vm.resume();
    await vm.run({ pages: { pages: [2, 3] } });
    await vm.pause();
    expect(await dirtyPages(vm, dialect)).toEqual([1, 2]);
    expect(await removed(vm)).toEqual([9]);
    expect(await vm.epoch('commit')).toEqual({ epoch: 1, open: false });
    expect(await dirtyPages(vm, dialect)).toEqual([2, 3]);
    expect(await removed(vm)).toEqual([]);
  });

  test.each(['aenv', 'e2b'] as const)(
    '%s: epochs that begin while the guest writes name every write',
    async (dialect) => {
      await using vm = await launchMiniVm({ ...options, backend, dialect });
      const pages = { firstPage: 100, pageCount: 400 };
      await vm.program({ pages, pagesPerSecond: 20_000 });
      const named = new Set<number>();
      for (let idle = false; !idle;) {
        ({ idle } = await vm.counters());
        await vm.epoch('begin');
        const pagesNow = await dirtyPages(vm, dialect);
        expect(await dirtyPages(vm, dialect)).toEqual(pagesNow);
        for (const page of pagesNow) named.add(page);
        await vm.epoch('commit');
      }
      expect([...named].filter((page) => page >= 100 && page < 500)).toHaveLength(400);
    },
  );

  test('an aborted epoch loses nothing', async () => {
    await using vm = await launchMiniVm({ ...options, backend, dialect: 'aenv' });
    await vm.run({ pages: { pages: [1, 2] } });
    await vm.removePages({ firstPage: 20, pageCount: 3 });
    await vm.pause();
    await vm.epoch('begin');
    await vm.resume();
    await vm.run({ pages: { pages: [3, 21] } });
    expect(await vm.epoch('abort')).toEqual({ epoch: 0, open: false });
    expect(await dirtyPages(vm, 'aenv')).toEqual([1, 2, 3, 21]);
    expect(await removed(vm)).toEqual([20, 22]);
  });

  test('a diff of an open epoch holds its pages and leaves it open', async () => {
    using folder = new TempFolder();
    await using vm = await launchMiniVm({ ...options, backend, dialect: 'firecracker' });
    await vm.run({ pages: { pages: [1, 2] } });
    await vm.pause();
    await vm.epoch('begin');
    await vm.deviceWrites({ pages: { pages: [3] } });
    for (const name of ['a', 'b']) {
      const memFilePath = folder.file(name);
      await vm.createSnapshot({ type: 'Diff', snapshotPath: folder.file('s'), memFilePath });
      expect(statSync(memFilePath).blocks * 512).toBe(2 * 4096);
    }
    await vm.epoch('commit');
    expect(bitsOf(await vm.set('dirty'))).toEqual([3]);
  });
});

test('epochs are refused out of turn', async () => {
  await using vm = await launchMiniVm(options);
  const act = (action: string): Promise<string> => fault(vm, 'PUT', '/vm/dirty-epoch', { action });
  expect(await act('commit')).toMatch('No dirty epoch is open');
  expect(await act('stop')).toMatch('action');
  await vm.pause();
  await vm.epoch('begin');
  expect(await act('begin')).toMatch('already open');
  await using untracked = await launchMiniVm({ ...options, track: false });
  await untracked.pause();
  await expect(untracked.epoch('begin')).rejects.toThrow('track_dirty_pages');
});
