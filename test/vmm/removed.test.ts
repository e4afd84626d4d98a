import { join } from 'node:path';
import { describe, expect, test } from 'vitest';
import { emptyBitmap, fullBitmap, setPages } from '../../src/vmm/bitmap.ts';
import { pageCount } from '../../src/units.ts';
import type { ParentPages } from '../../src/vmm/source.ts';
import { attach, errorOf, must, pagesOf, type Attached } from './harness.ts';
import { never } from './raw-server.ts';

const PAGES = 4096;
const written = [0x300, 0x301, 0x302, 0x700, 0x701];

function parentOf(data: readonly number[], aboveLaunch = data): ParentPages {
  const pages = (list: readonly number[]): ParentPages['data'] => {
    const bitmap = emptyBitmap(pageCount(PAGES));
    for (const page of list) setPages(bitmap.bits, page, 1);
    return bitmap;
  };
  return { data: pages(data), aboveLaunch: pages(aboveLaunch) };
}

/** A VM that wrote `written`, was captured once, and runs on. */
async function captured(dialect: 'aenv' | 'e2b' | 'firecracker'): Promise<Attached> {
  const attached = await attach({ dialect, memoryMib: 16 });
  await attached.vm.run({ pages: { pages: written } });
  await attached.vm.pause();
  return attached;
}

describe.each(['aenv', 'e2b', 'firecracker'] as const)('dialect %s', (dialect) => {
  test('removed pages are zero, also when the guest has read them since', async () => {
    await using attached = await captured(dialect);
    const { vm } = attached;
    const source = await attached.source('dirty');
    await attached.fetch(source);
    await vm.resume();
    await vm.removePages({ firstPage: 0x301, pageCount: 2 });
    await vm.removePages({ firstPage: 0x900, pageCount: 2 });
    await vm.run({ pages: { pages: [0x302] }, fill: 'read' });
    await vm.run({ pages: { pages: [0x800, 0x801] } });
    await vm.pause();
    const set = await attached.fetch(source, { parent: parentOf([...written, 0x901]) });
    const selected = pagesOf(set.selected);
    expect(selected).toEqual(expect.arrayContaining([0x800, 0x801]));
    expect(selected).not.toContain(0x301);
    // A cumulative set still names the page that was read: it is read as zeroes.
    const zero = source.cumulative && selected.includes(0x302) ? [] : [0x302];
    expect(pagesOf(set.zero)).toEqual([0x301, ...zero, 0x901]);
  });

  test('a removed page that was written again is selected', async () => {
    await using attached = await captured(dialect);
    const { vm } = attached;
    const source = await attached.source('dirty');
    await attached.fetch(source);
    await vm.resume();
    await vm.removePages({ firstPage: 0x301, pageCount: 1 });
    await vm.run({ pages: { pages: [0x301] } });
    await vm.pause();
    const set = await attached.fetch(source, { parent: parentOf(written) });
    expect(pagesOf(set.selected)).toContain(0x301);
    expect(pagesOf(set.zero)).toEqual([]);
  });

  test('restored from a file, mode pagemap selects writes and not reads', async () => {
    await using first = await captured(dialect);
    const memoryPath = join(first.directory, 'image');
    const snapshotPath = join(first.directory, 'image-state');
    await first.vm.createSnapshot({ type: 'Full', snapshotPath, memFilePath: memoryPath });
    await using attached = await attach({
      dialect,
      restore: { snapshotPath, memoryPath, resume: true },
    });
    const { vm } = attached;
    await vm.run({ pages: { firstPage: 0x400, pageCount: 0x100 }, fill: 'read' });
    await vm.run({ pages: { pages: [0x700, 0x810] } });
    await vm.removePages({ firstPage: 0x300, pageCount: 1 });
    await vm.pause();
    const source = await attached.source('pagemap');
    must(await source.layout(never));
    const set = await attached.fetch(source, { parent: parentOf(written, []) });
    const selected = pagesOf(set.selected);
    expect(selected).toEqual(expect.arrayContaining([0x700, 0x810]));
    expect(selected.length).toBeLessThan(16);
    expect(pagesOf(set.zero)).toEqual([0x300]);
    if (dialect !== 'firecracker') expect(set.bytes.kind).toBe('process');
  });
});

test('a page whose own copy is gone is selected, where a layer has it', async () => {
  await using first = await captured('e2b');
  const memoryPath = join(first.directory, 'image');
  const snapshotPath = join(first.directory, 'image-state');
  await first.vm.createSnapshot({ type: 'Full', snapshotPath, memFilePath: memoryPath });
  await using attached = await attach({
    dialect: 'e2b',
    restore: { snapshotPath, memoryPath, resume: true },
  });
  await attached.vm.pause();
  const source = await attached.source('pagemap');
  const parent = parentOf(written, [0x310, 0x311]);
  const set = await attached.fetch(source, { parent });
  expect(pagesOf(set.selected)).toEqual(expect.arrayContaining([0x310, 0x311]));
  const unknown = await attached.fetch(source, { parent: 'unknown' });
  expect(pagesOf(unknown.selected).length + pagesOf(unknown.zero).length).toBe(PAGES);
});

test('mode pagemap is refused for a VM whose memory is no mapped file', async () => {
  await using attached = await captured('e2b');
  const error = errorOf(await (await attached.source('pagemap')).fetch(attached.newFetch()));
  expect(error.kind).toBe('tracking-unsupported');
});

test('without a parent nothing is zero', async () => {
  await using attached = await captured('e2b');
  await attached.vm.removePages({ firstPage: 0x301, pageCount: 1 });
  const set = await attached.fetch(await attached.source('mincore'));
  expect(set.zero).toBeNull();
  expect(pagesOf(set.selected)).not.toContain(0x301);
  const all = { data: fullBitmap(pageCount(PAGES)), aboveLaunch: fullBitmap(pageCount(PAGES)) };
  const above = await attached.fetch(await attached.source('mincore'), { parent: all });
  expect(pagesOf(above.selected).length + pagesOf(above.zero).length).toBe(PAGES);
});

describe.each(['aenv', 'e2b'] as const)('epochs of a VMM of dialect %s', (dialect) => {
  test('a committed epoch is forgotten, an aborted or forgotten one is not', async () => {
    await using attached = await attach({ dialect, memoryMib: 16, dirtyEpochs: true });
    const { vm } = attached;
    await vm.run({ pages: { pages: written } });
    await vm.pause();
    const source = await attached.source('dirty');
    const { epochs } = source;
    if (epochs === null) throw new Error('no epochs');
    expect(source.cumulative).toBe(false);
    const one = await attached.fetch(source, { parent: parentOf([]) });
    expect(pagesOf(one.selected)).toEqual(expect.arrayContaining(written));
    must(await epochs.commit(never));
    must(await epochs.commit(never));
    await vm.resume();
    await vm.run({ pages: { pages: [0x800] } });
    await vm.pause();
    const two = await attached.fetch(source, { parent: parentOf(written) });
    expect(pagesOf(two.selected)).toContain(0x800);
    expect(pagesOf(two.selected)).not.toContain(0x300);
    must(await epochs.abort(never));
    await vm.resume();
    await vm.run({ pages: { pages: [0x801] } });
    await vm.removePages({ firstPage: 0x700, pageCount: 1 });
    await vm.pause();
    const three = await attached.fetch(source, { parent: parentOf(written) });
    expect(pagesOf(three.selected)).toEqual(expect.arrayContaining([0x800, 0x801]));
    expect(pagesOf(three.zero)).toEqual([0x700]);
    const four = await attached.fetch(source, { parent: parentOf(written) });
    expect(pagesOf(four.selected)).toEqual(pagesOf(three.selected));
    expect(pagesOf(four.zero)).toEqual([0x700]);
  });
});
