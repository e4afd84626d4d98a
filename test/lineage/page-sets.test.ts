import fc from 'fast-check';
import { expect, test } from 'vitest';
import { bitmapProblem, decodeBitmap } from '../../src/lineage/page-sets.ts';
import { encodeBitmap, joinSets } from '../../src/lineage/page-sets.ts';
import { countPages, emptyBitmap } from '../../src/vmm/bitmap.ts';
import type { PageSets } from '../../src/lineage/page-sets.ts';
import type { PageBitmap } from '../../src/memory.ts';
import { pageCount } from '../../src/units.ts';

const PAGES = 200;
const seed = Number(process.env['SEED'] ?? Date.now() % 2 ** 31);
console.log(`page-sets seed ${seed}`);

function bitmap(pages: Iterable<number>, count = PAGES): PageBitmap {
  const made = emptyBitmap(pageCount(count));
  for (const page of pages) made.bits[page >> 3] = (made.bits[page >> 3] ?? 0) | (1 << (page & 7));
  return made;
}

function pagesOf(map: PageBitmap | null): Set<number> {
  const pages = new Set<number>();
  if (map === null) return pages;
  for (let page = 0; page < map.pageCount; page += 1) {
    if (((map.bits[page >> 3] ?? 0) >> (page & 7)) & 1) pages.add(page);
  }
  return pages;
}

const pageSet = fc.uniqueArray(fc.integer({ min: 0, max: PAGES - 1 }), { maxLength: 40 });
const sets = fc.record({ selected: pageSet, zero: fc.option(pageSet) });
type RawSets = { selected: number[]; zero: number[] | null };
const toSets = (raw: RawSets): PageSets => ({
  selected: bitmap(raw.selected),
  zero: raw.zero === null ? null : bitmap(raw.zero),
});

function everyJoin(check: (newest: RawSets, older: RawSets, joined: PageSets) => void): void {
  fc.assert(
    fc.property(sets, sets, (newest, older) => {
      check(newest, older, joinSets(toSets(newest), toSets(older)));
    }),
    { seed, numRuns: 500 },
  );
}

test('S1 a joined set never both reads a page and calls it zero; selected wins in one fetch', () => {
  everyJoin((newest, _older, joined) => {
    const zero = pagesOf(joined.zero);
    const selected = pagesOf(joined.selected);
    for (const page of zero) expect(selected.has(page)).toBe(false);
    for (const page of newest.selected) expect(selected.has(page)).toBe(true);
  });
});

test('S2 the newest fetch decides what a page is: zero over an older write, and the reverse', () => {
  everyJoin((newest, _older, joined) => {
    const zero = pagesOf(joined.zero);
    const selected = pagesOf(joined.selected);
    for (const page of newest.zero ?? []) {
      expect(zero.has(page)).toBe(!newest.selected.includes(page));
    }
    for (const page of newest.selected) expect(selected.has(page)).toBe(true);
  });
});

test('S3 a page that only older entries name is read, even one they called zero', () => {
  everyJoin((newest, older, joined) => {
    const selected = pagesOf(joined.selected);
    for (const page of [...older.selected, ...(older.zero ?? [])]) {
      if (newest.zero?.includes(page) === true) continue;
      expect(selected.has(page)).toBe(true);
    }
  });
});

test('S4 no page that any entry names is missing, and none is invented', () => {
  everyJoin((newest, older, joined) => {
    const all = new Set([
      ...newest.selected,
      ...(newest.zero ?? []),
      ...older.selected,
      ...(older.zero ?? []),
    ]);
    const got = new Set([...pagesOf(joined.selected), ...pagesOf(joined.zero)]);
    expect(got).toEqual(all);
    expect(countPages(joined.selected)).toBe(pagesOf(joined.selected).size);
  });
});

test('a fetch over an empty ledger stays as it is', () => {
  const joined = joinSets({ selected: bitmap([1, 2]), zero: bitmap([2, 3]) }, null);
  expect([...pagesOf(joined.selected)]).toEqual([1, 2]);
  expect([...pagesOf(joined.zero)]).toEqual([3]);
});

test('bitmaps that start at an odd address join like any other', () => {
  const odd = new Uint8Array(33).subarray(1);
  odd[0] = 0b101;
  const map = { pageCount: pageCount(PAGES), bits: odd };
  expect([...pagesOf(joinSets({ selected: map, zero: null }, null).selected)]).toEqual([0, 2]);
});

test('stored bitmaps come back as they were: sparse, full, random, tails and none', () => {
  const random = new Uint8Array(8192).map((_, i) => (i * 2654435761) >>> 13);
  const cases: PageBitmap[] = [
    bitmap([]),
    bitmap([0, 63, 64, 199]),
    { pageCount: pageCount(65536), bits: new Uint8Array(8192).fill(0xff) },
    { pageCount: pageCount(65536), bits: random },
    bitmap([4999], 5000),
    emptyBitmap(pageCount(0)),
  ];
  for (const map of cases) expect(decodeBitmap(encodeBitmap(map))).toEqual(map);
  const sparse = emptyBitmap(pageCount(16 * 1024 * 1024));
  sparse.bits[1_000_000] = 1;
  expect(encodeBitmap(sparse).length).toBeLessThan(2048);
});

test('a damaged stored bitmap is refused, never read past', () => {
  const good = encodeBitmap(bitmap([1, 5000], 9000));
  expect(() => decodeBitmap(good.subarray(0, good.length - 1))).toThrow(RangeError);
  expect(() => decodeBitmap(good.subarray(0, 5))).toThrow(RangeError);
  expect(() => decodeBitmap(Buffer.concat([good, Buffer.of(0)]))).toThrow(RangeError);
  expect(() => decodeBitmap(Buffer.from(good).fill(0, 0, 4))).toThrow(RangeError);
});

test('a bitmap too short, too long or with bits past its end is named as such', () => {
  const bits = (n: number): Uint8Array => new Uint8Array(n);
  expect(bitmapProblem({ pageCount: pageCount(65), bits: bits(8) })).toMatch(/8 bytes, not 16/);
  expect(bitmapProblem({ pageCount: pageCount(65), bits: bits(24) })).toMatch(/24 bytes, not 16/);
  const tail = { pageCount: pageCount(65), bits: bits(16) };
  expect(bitmapProblem(tail)).toBeNull();
  tail.bits[8] = 0b10;
  expect(bitmapProblem(tail)).toMatch(/bit 65 set/);
});
