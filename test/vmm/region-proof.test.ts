/** Guest memory is found by what it holds, where the address map does not say where it begins. */
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { launchMiniVm, type MiniVm } from '../../src/minivm/launch.ts';
import type { PageBitmap } from '../../src/memory.ts';
import { GIB, MIB, PAGE_BYTES, pageCount } from '../../src/units.ts';
import type { Vma } from '../../src/vmm/address-map.ts';
import { emptyBitmap, fullBitmap, setPages } from '../../src/vmm/bitmap.ts';
import { findByContent, type ProofRequest } from '../../src/vmm/region-proof.ts';
import { attach, errorOf, pagesOf } from './harness.ts';
import { never } from './raw-server.ts';

const memoryMib = 16;
const pages = pageCount((memoryMib * MIB) / PAGE_BYTES);

/** Where a small VM has its regions, in image order: host addresses. */
async function hostAddresses(vm: MiniVm): Promise<bigint[]> {
  const { regions } = await vm.info();
  return regions.map((region) => BigInt(region.hostAddress));
}

const anonymous = (start: bigint, end: bigint): Vma => ({
  start,
  end,
  writable: true,
  shared: false,
  offset: 0n,
  file: null,
  path: '',
});

const listed = (numbers: readonly number[]): PageBitmap => {
  const bitmap = emptyBitmap(pages);
  for (const page of numbers) setPages(bitmap.bits, page, 1);
  return bitmap;
};

/** A paused small VM that has written some pages, its memory file, and its one region's address. */
async function pausedVm(written: readonly number[]) {
  const attached = await attach({ dialect: 'firecracker', memoryMib });
  const { vm, directory } = attached;
  if (written.length > 0) await vm.run({ pages: { pages: [...written] }, value: 5 });
  await vm.pause();
  const path = join(directory, 'full');
  const snapshotPath = join(directory, 'full-state');
  await vm.createSnapshot({ type: 'Full', snapshotPath, memFilePath: path });
  const [host = 0n] = await hostAddresses(vm);
  const request = (more: Partial<ProofRequest> = {}): ProofRequest => ({
    pid: vm.pid,
    vmas: [anonymous(host - 0x21000n, host + BigInt(memoryMib * MIB) + 0x43000n)],
    imageBytes: memoryMib * MIB,
    path,
    pages: listed(written),
    samplesMax: 64,
    signal: never,
    ...more,
  });
  return { host, request, [Symbol.asyncDispose]: () => attached[Symbol.asyncDispose]() };
}

const written = Array.from({ length: 200 }, (_, at) => 0x300 + at * 7);

test('merged with neighbours on both sides, one place is left', async () => {
  await using vm = await pausedVm(written);
  const found = await findByContent(vm.request());
  expect(found).toMatchObject({ regions: [{ hostAddress: vm.host, imageOffset: 0 }] });
});

test('a full file tells as well, though most of its pages are zero', async () => {
  await using vm = await pausedVm(written);
  const found = await findByContent(vm.request({ pages: fullBitmap(pages), samplesMax: 2048 }));
  expect(found).toMatchObject({ regions: [{ hostAddress: vm.host }] });
});

test('nothing that tells places apart leaves it open', async () => {
  await using vm = await pausedVm(written);
  expect(await findByContent(vm.request({ pages: emptyBitmap(pages) }))).toBe('unknown');
});

test('memory that is elsewhere is not taken for something else', async () => {
  await using vm = await pausedVm(written);
  const size = BigInt(memoryMib * MIB);
  const beside = [anonymous(vm.host + 0x1000n, vm.host + 0x1000n + size)];
  expect(await findByContent(vm.request({ vmas: beside }))).toBe('nowhere');
  const small = [anonymous(vm.host, vm.host + size - 0x1000n)];
  expect(await findByContent(vm.request({ vmas: small }))).toBe('nowhere');
});

test('a file of other bytes proves no place, however well its pages fit', async () => {
  await using vm = await pausedVm(written);
  await using other = await launchMiniVm({ dialect: 'firecracker', memoryMib });
  await other.run({ pages: { pages: written }, value: 6 });
  const { pid } = other;
  await other.pause();
  const [host = 0n] = await hostAddresses(other);
  const vmas = [anonymous(host, host + BigInt(memoryMib * MIB))];
  expect(await findByContent(vm.request({ pid, vmas }))).toBe('nowhere');
});

test('two regions in one mapping, the second below the first, are found in mode mincore', async () => {
  await using attached = await attach({ dialect: 'firecracker', memoryMib: 3 * 1024 + 64 });
  const { vm } = attached;
  const second = (3 * GIB) / PAGE_BYTES;
  await vm.run({ pages: { pages: [...written, ...written.map((page) => second + page)] } });
  await vm.pause();
  const source = await attached.source('mincore');
  const set = await attached.fetch(source);
  const [low = 0n, high = 0n] = await hostAddresses(vm);
  expect(set.layout.regions.map((region) => [region.imageOffset, region.hostAddress])).toEqual([
    [0, low],
    [3 * GIB, high],
  ]);
  const maps = readFileSync(`/proc/${vm.pid}/maps`, 'utf8');
  const end = (high + BigInt(64 * MIB)).toString(16);
  expect(end === low.toString(16), 'the kernel puts the second region below the first').toBe(true);
  expect(maps).not.toContain(`${low.toString(16)}-`);
});

test('a second region that nobody wrote leaves it open: mincore fails, dirty goes on', async () => {
  await using attached = await attach({ dialect: 'firecracker', memoryMib: 3 * 1024 + 64 });
  const { vm } = attached;
  await vm.run({ pages: { pages: [...written] } });
  await vm.pause();
  const mincore = await attached.source('mincore');
  expect(errorOf(await mincore.fetch(attached.newFetch())).kind).toBe('layout-unknown');
  await vm.resume();
  await vm.run({ pages: { pages: [...written] } });
  await vm.pause();
  const set = await attached.fetch(await attached.source('dirty'));
  expect(set.bytes).toMatchObject({ kind: 'file' });
  expect(pagesOf(set.selected)).toEqual(expect.arrayContaining(written));
});
