/** The VM state without a memory file, where the VMM writes the state before it opens that file. */
import { existsSync, readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { crc64 } from '../../src/crc64.ts';
import { launchMiniVm } from '../../src/minivm/launch.ts';
import { MIB, PAGE_BYTES } from '../../src/units.ts';
import { attach, pagesOf, pagesOfWords } from './harness.ts';

const written = Array.from({ length: 200 }, (_, at) => 0x300 + at * 7);
const more = [0x310, 0x311, 0xf00];

test('the sum is the one that the algorithm is known by', () => {
  expect(crc64(Buffer.from('123456789'))).toBe(0xe9c6d914c4b8d9can);
  expect(crc64(Buffer.alloc(0))).toBe(0n);
});

test('once the memory is found, mode mincore needs no memory file', async () => {
  await using attached = await attach({
    dialect: 'firecracker',
    memoryMib: 16,
    upstreamState: true,
  });
  const { vm, directory } = attached;
  await vm.run({ pages: { pages: written }, value: 5 });
  await vm.pause();
  const source = await attached.source('mincore');
  await attached.fetch(source);
  await vm.resume();
  await vm.run({ pages: { pages: more }, value: 6 });
  await vm.pause();
  const before = new Set(readdirSync(directory));
  const set = await attached.fetch(source);
  expect(set.bytes).toEqual({ kind: 'process' });
  expect(pagesOf(set.selected)).toEqual(expect.arrayContaining([...written, ...more]));
  const made = readdirSync(directory).filter((name) => !before.has(name));
  expect(made).toHaveLength(1);
  // Writing a memory file would have forgotten what is dirty.
  expect(pagesOfWords(await vm.set('dirty'), [4096])).toEqual(expect.arrayContaining(more));
  const state = set.vmStatePath ?? '';
  expect(crc64(readFileSync(state))).toBe(0n);
  const memoryPath = join(directory, 'memory');
  const snapshotPath = join(directory, 'other-state');
  await vm.createSnapshot({ type: 'Full', snapshotPath, memFilePath: memoryPath });
  await using restored = await launchMiniVm({
    dialect: 'firecracker',
    restore: { snapshotPath: state, memoryPath },
  });
  const pages = (16 * MIB) / PAGE_BYTES;
  expect(await restored.hashes(0, pages)).toEqual(await vm.hashes(0, pages));
});

test('a VMM that opens the memory file first is asked once, and writes it from then on', async () => {
  await using attached = await attach({ dialect: 'firecracker', memoryMib: 16 });
  const { vm } = attached;
  await vm.run({ pages: { pages: written }, value: 5 });
  await vm.pause();
  const source = await attached.source('mincore');
  await attached.fetch(source);
  await vm.clearRequests();
  for (const creates of [2, 1]) {
    const set = await attached.fetch(source);
    expect(existsSync(set.vmStatePath ?? '')).toBe(true);
    expect(pagesOf(set.selected)).toEqual(expect.arrayContaining(written));
    const asked = (await vm.requests()).filter(({ path }) => path === '/snapshot/create');
    expect(asked).toHaveLength(creates);
    await vm.clearRequests();
  }
});
