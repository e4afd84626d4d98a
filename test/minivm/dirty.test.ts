import { describe, expect, test } from 'vitest';
import { launchMiniVm } from '../../src/minivm/launch.ts';
import { drawPages } from '../../src/minivm/page-choice.ts';
import { bitsOf, dirtyPages, guests, highPage, rangesOf, twoRegions } from './helpers.ts';

const seed = Number(process.env['SEED'] ?? 20_260);
console.log(`SEED=${seed}`);

describe.each(guests)('dirty sets of a %s guest', (backend) => {
  test.each(['aenv', 'e2b'] as const)(
    '%s names exactly what guest and device wrote',
    async (dialect) => {
      await using vm = await launchMiniVm({ backend, dialect, regions: twoRegions });
      const guestPages = [...drawPages(seed, 300, 0, highPage + 2048)];
      const devicePages = [...drawPages(seed + 1, 50, 0, highPage + 2048)];
      await vm.run({ pages: { pages: guestPages } });
      await vm.deviceWrites({ pages: { pages: devicePages } });
      await vm.pause();
      const both = [...new Set([...guestPages, ...devicePages])].sort((a, b) => a - b);
      expect(await dirtyPages(vm, dialect)).toEqual(both);
      expect(await dirtyPages(vm, dialect), 'reading clears nothing').toEqual(both);
      const inReach = guestPages.filter((page) => backend === 'thread' || page < highPage);
      expect(bitsOf(await vm.set('guest-log'))).toEqual(inReach);
      await vm.resume();
      await vm.run({ pages: { pages: [0] } });
      await vm.pause();
      expect(await dirtyPages(vm, dialect)).toEqual(
        [...new Set([0, ...both])].sort((a, b) => a - b),
      );
    },
  );

  test('reads make pages resident and not dirty', async () => {
    await using vm = await launchMiniVm({ backend, dialect: 'aenv', memoryMib: 64 });
    await vm.run({ pages: { firstPage: 100, pageCount: 5000 }, fill: 'read' });
    await vm.run({ pages: { pages: [7, 200] }, fill: 'constant', value: 0xdeadbeef });
    await vm.pause();
    expect(await rangesOf(vm, '/vm/dirty-memory-ranges')).toEqual([7, 200]);
    const resident = bitsOf(await vm.set('resident'));
    expect(resident).toHaveLength(5001);
    expect(bitsOf(await vm.set('empty'))).toHaveLength(4999);
    expect((await vm.readBytes(200 * 4096, 4)).readUInt32LE()).toBe(0xdeadbeef);
  });

  test('with tracking off the set is the resident pages', async () => {
    await using vm = await launchMiniVm({ backend, dialect: 'all', memoryMib: 16, track: false });
    await vm.run({ pages: { firstPage: 10, pageCount: 5 }, fill: 'read' });
    await vm.run({ pages: { firstPage: 30, pageCount: 2 } });
    await vm.pause();
    const pages = [10, 11, 12, 13, 14, 30, 31];
    expect(await dirtyPages(vm, 'aenv')).toEqual(pages);
    expect(await dirtyPages(vm, 'e2b')).toEqual(pages);
  });

  test('bitmaps pad each region to a word, and mappings tell where each region is', async () => {
    const regions = [
      { guestAddress: 0n, bytes: 65 * 4096 },
      { guestAddress: 1n << 32n, bytes: 3 * 4096 },
    ];
    await using vm = await launchMiniVm({ backend, dialect: 'e2b', regions });
    await vm.deviceWrites({ pages: { pages: [0, 64, 65, 67] } });
    await vm.pause();
    expect((await vm.send('GET', '/memory/dirty')).body.toString()).toBe('{"bitmap":[1,1,5]}');
    const { regions: placed } = await vm.info();
    expect(JSON.parse((await vm.send('GET', '/memory/mappings')).body.toString())).toEqual({
      mappings: placed.map((region) => ({
        base_host_virt_addr: Number(region.hostAddress),
        size: region.bytes,
        offset: region.imageOffset,
        page_size: 4096,
      })),
    });
  });

  test('nothing is written after a pause has been answered', async () => {
    await using vm = await launchMiniVm({ backend, memoryMib: 16 });
    await vm.program({ pages: { firstPage: 0, pageCount: 4096 }, loop: true, words: 16 });
    for (let round = 0; round < 20; round += 1) {
      await vm.pause();
      const before = await vm.hashes(0, 4096);
      const counters = await vm.counters();
      expect(await vm.hashes(0, 4096)).toEqual(before);
      expect(await vm.counters()).toEqual(counters);
      await vm.resume();
    }
    const { pagesTotal, crash } = await vm.counters();
    expect(crash).toBe('');
    expect(pagesTotal).toBeGreaterThan(0);
  });

  test('the guest’s own clock sees how long it was frozen', async () => {
    await using vm = await launchMiniVm({ backend, memoryMib: 16 });
    await vm.resetGap();
    await vm.pause();
    const from = performance.now();
    await vm.hashes(0, 4096);
    const frozenMs = performance.now() - from;
    await vm.resume();
    await vm.run({ pages: { pages: [1] } });
    expect((await vm.counters()).maxGapNs / 1e6).toBeGreaterThanOrEqual(frozenMs * 0.99);
  });

  test('a paced program keeps its pace', async () => {
    await using vm = await launchMiniVm({ backend, memoryMib: 16 });
    const from = performance.now();
    await vm.run({ pages: { firstPage: 0, pageCount: 100 }, words: 2, pagesPerSecond: 1000 });
    expect(performance.now() - from).toBeGreaterThanOrEqual(95);
  });
});

test('the same program writes the same bytes in every guest', async () => {
  const hashes = [];
  for (const dialect of ['firecracker', 'aenv', 'e2b'] as const) {
    await using vm = await launchMiniVm({ dialect, memoryMib: 16 });
    await vm.run({ pages: { seed, count: 200 }, value: seed });
    hashes.push(await vm.hashes(0, 4096));
  }
  expect(hashes[1]).toEqual(hashes[0]);
  expect(hashes[2]).toEqual(hashes[0]);
});

test('drawn pages are distinct, in range and the same for the same seed', () => {
  const drawn = drawPages(seed, 1000, 50, 1200);
  expect(new Set(drawn).size).toBe(1000);
  expect(Math.min(...drawn)).toBeGreaterThanOrEqual(50);
  expect(Math.max(...drawn)).toBeLessThan(1250);
  expect(drawPages(seed, 1000, 50, 1200)).toEqual(drawn);
  expect(drawPages(seed + 1, 1000, 50, 1200)).not.toEqual(drawn);
});
