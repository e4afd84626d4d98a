import { stat } from 'node:fs/promises';
import { describe, expect, test } from 'vitest';
import { MIB, PAGE_BYTES } from '../../src/units.ts';
import { attach, errorOf, must, pagesOf, pagesOfWords, type Attached } from './harness.ts';
import { never } from './raw-server.ts';

const dialects = ['firecracker', 'aenv', 'e2b', 'all'] as const;
const regions = [
  { guestAddress: 0n, bytes: 16 * MIB },
  { guestAddress: 0x1_0000_0000n, bytes: 8 * MIB },
];
const regionPages = regions.map((region) => region.bytes / PAGE_BYTES);
const listed = [0x300, 0x301, 0x4ff, 0x1003, 0x1400, 0x17ff];

async function dirtyTruth(attached: Attached): Promise<number[]> {
  return pagesOfWords(await attached.vm.set('dirty'), regionPages);
}

describe.each(dialects)('dialect %s', (dialect) => {
  test('what the guest and its devices wrote is selected, and its state saved', async () => {
    await using attached = await attach({ dialect, memoryMib: 16 });
    const { vm, facts } = attached;
    expect(facts.dialect).toBe(dialect === 'all' ? 'aenv' : dialect);
    const source = await attached.source('dirty');
    await vm.run({ pages: { pages: [0x300, 0x301, 0x7ff] } });
    await vm.deviceWrites({ pages: { pages: [0x555] } });
    const running = errorOf(await source.fetch(attached.newFetch()));
    expect(running.kind).toBe(dialect === 'firecracker' ? 'vm-ran' : 'vmm-refused');
    await vm.pause();
    const truth = pagesOfWords(await vm.set('dirty'), [4096]);
    const set = await attached.fetch(source);
    expect(pagesOf(set.selected)).toEqual(truth);
    expect(truth).toEqual(expect.arrayContaining([0x300, 0x301, 0x555, 0x7ff]));
    expect((await stat(set.vmStatePath ?? '')).size).toBeGreaterThan(0);
    expect(set.bytes.kind).toBe(dialect === 'firecracker' ? 'file' : 'process');
    expect(set.layout.imageBytes).toBe(16 * MIB);
    const [region] = (await vm.info()).regions;
    expect(set.layout.regions[0]?.hostAddress).toBe(BigInt(region?.hostAddress ?? 0));
    const wide = await attached.fetch(source, { widen: true, parent: 'unknown' });
    expect(pagesOf(wide.selected)).toEqual(expect.arrayContaining([0x300, 0x301, 0x555, 0x7ff]));
  });

  test('every region is covered, and an added one is noticed', async () => {
    await using attached = await attach({ dialect, regions });
    const { vm } = attached;
    await vm.run({ pages: { pages: listed } });
    await vm.pause();
    const truth = await dirtyTruth(attached);
    const source = await attached.source('dirty');
    const set = await attached.fetch(source);
    expect(pagesOf(set.selected)).toEqual(truth);
    expect(truth).toEqual(expect.arrayContaining(listed));
    if (set.bytes.kind === 'process') {
      expect(set.layout.regions.map((r) => r.hostAddress)).toEqual(
        (await vm.info()).regions.map((r) => BigInt(r.hostAddress)),
      );
    }
    await vm.addRegion({ guestAddress: 0x2_0000_0000n, bytes: 4 * MIB });
    if (dialect !== 'firecracker') {
      expect(errorOf(await source.layout(never)).kind).toBe('layout-changed');
    }
    expect(errorOf(await source.fetch(attached.newFetch())).kind).toBe('layout-changed');
  });

  test.skipIf(dialect === 'firecracker')(
    'a VM that runs again, or grew, while its pages are read is noticed',
    async () => {
      await using attached = await attach({ dialect, regions });
      const { vm } = attached;
      await vm.run({ pages: { pages: listed } });
      const source = await attached.source('mincore');
      await source.layout(never);
      await vm.pause();
      const set = await attached.fetch(source);
      expect(await set.confirm(never)).toEqual({ ok: true, value: undefined });
      await vm.resume();
      expect(errorOf(await set.confirm(never)).kind).toBe('vm-ran');
      await vm.pause();
      if (dialect !== 'e2b') return;
      await vm.addRegion({ guestAddress: 0x2_0000_0000n, bytes: 4 * MIB });
      expect(errorOf(await set.confirm(never)).kind).toBe('layout-changed');
    },
  );

  test('without tracking mode dirty is refused, and mincore selects what is resident', async () => {
    await using attached = await attach({ dialect, memoryMib: 16, track: false });
    const { vm } = attached;
    expect(errorOf(await attached.open('dirty')).kind).toBe('tracking-off');
    await vm.run({ pages: { pages: [0x300, 0x301, 0x7ff] } });
    await vm.pause();
    const truth = pagesOfWords(await vm.set('resident'), [4096]);
    const set = await attached.fetch(await attached.source('mincore'));
    expect(pagesOf(set.selected)).toEqual(truth);
    expect(truth).toEqual(expect.arrayContaining([0x300, 0x301, 0x7ff]));
  });
});

test('nothing dirty, and nobody says where the memory is: empty without a parent', async () => {
  await using attached = await attach({ dialect: 'aenv', memoryMib: 16 });
  await attached.vm.pause();
  const source = await attached.source('dirty');
  expect(must(await source.layout(never)).imageBytes).toBe(16 * MIB);
  const stored = await source.fetch(attached.newFetch({ parent: 'unknown' }));
  expect(errorOf(stored).kind).toBe('layout-unknown');
  const set = await attached.fetch(source, { parent: 'none' });
  expect(pagesOf(set.selected)).toEqual(pagesOfWords(await attached.vm.set('dirty'), [4096]));
});
