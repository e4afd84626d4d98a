import { expect, test } from 'vitest';
import { memoryMappings } from '../../src/vmm/answers.ts';
import { countPages, hasPage } from '../../src/vmm/bitmap.ts';
import { decodeDirtyRanges, hostSpan } from '../../src/vmm/dirty-ranges.ts';
import { checked, parseExact } from '../../src/vmm/exact-json.ts';
import { decodeMappings, decodePageBits, type Mappings } from '../../src/vmm/page-bits.ts';
import { Failure } from '../../src/result.ts';
import type { VmmError } from '../../src/vmm/errors.ts';
import type { PageBitmap } from '../../src/memory.ts';

const PAGE = 4096;

function failure(body: () => unknown): VmmError {
  try {
    body();
  } catch (error) {
    if (error instanceof Failure) return (error as Failure<VmmError>).detail;
    throw error;
  }
  throw new Error('did not fail');
}

function pagesOf(bitmap: PageBitmap): number[] {
  const pages: number[] = [];
  for (let page = 0; page < bitmap.pageCount; page += 1)
    if (hasPage(bitmap, page)) pages.push(page);
  return pages;
}

const ranges = (list: string, memory = 1024 * PAGE, page = PAGE): Buffer =>
  Buffer.from(`{"page_size":${page},"memory_size":${memory},"ranges":[${list}]}`);
const range = (host: string, offset: number | string, length: number | string): string =>
  `{"base_host_virt_addr":${host},"image_offset":${offset},"length":${length}}`;

test('ranges above 2^53 keep every bit of their address', () => {
  const host = (2n ** 63n + 2n ** 53n + 0x1000n).toString();
  const decoded = decodeDirtyRanges(ranges(range(host, 8192, 4096)), 'x');
  expect(decoded.spans).toHaveLength(1);
  const [span] = decoded.spans;
  expect(span === undefined ? 0n : hostSpan(span).start).toBe(2n ** 63n + 2n ** 53n + 0x1000n);
  expect(pagesOf(decoded.dirty)).toEqual([2]);
});

test('keys in any order, unknown keys and white space do not matter', () => {
  const text = `\n { "ranges" : [ {"length":4096, "note":{"a":["}",1.5e3,null]}, "image_offset":0,
    "base_host_virt_addr": 65536} ], "extra": "\\"]}", "memory_size": 8192, "page_size": 4096 } `;
  const decoded = decodeDirtyRanges(Buffer.from(text), 'x');
  expect(pagesOf(decoded.dirty)).toEqual([0]);
});

test('regions are told apart by the distance of address and offset', () => {
  const list = [
    range('1048576', 0, 8192),
    range(String(1048576 + 16384), 16384, 4096),
    range('4294967296', 65536, 4096),
    range(String(4294967296 + 8192), 65536 + 8192, 4096),
  ].join(',');
  const decoded = decodeDirtyRanges(ranges(list), 'x');
  expect(decoded.spans.map((s) => [s.imageStart, s.imageEnd])).toEqual([
    [0, 20480],
    [65536, 65536 + 12288],
  ]);
  expect(pagesOf(decoded.dirty)).toEqual([0, 1, 4, 16, 18]);
});

test('no ranges are an empty set', () => {
  const decoded = decodeDirtyRanges(ranges(''), 'x');
  expect(decoded.spans).toEqual([]);
  expect(countPages(decoded.dirty)).toBe(0);
  expect(decoded.imageBytes).toBe(1024 * PAGE);
});

test.each([
  ['a zero length', range('4096', 0, 0), 'ranges[0].length'],
  ['a length of half a page', range('4096', 0, 2048), 'ranges[0].length'],
  ['an offset within a page', range('4096', 100, 4096), 'ranges[0].image_offset'],
  ['an address within a page', range('4097', 0, 4096), 'ranges[0].base_host_virt_addr'],
  ['a range past the end', range('4096', 1023 * PAGE, 8192), 'ranges[0]'],
  ['an address space that ends', range('18446744073709547520', 0, 8192), 'ranges[0]'],
  ['a negative offset', range('4096', -4096, 4096), 'ranges[0].image_offset'],
  ['a length of 1e3', range('4096', 0, '4.096e3'), 'ranges[0].length'],
  ['a float address', range('4096.0', 0, 4096), 'ranges[0].base_host_virt_addr'],
  ['an address in a string', range('"4096"', 0, 4096), 'ranges[0].base_host_virt_addr'],
  [
    'an address beyond 64 bits',
    range('18446744073709551616', 0, 4096),
    'ranges[0].base_host_virt_addr',
  ],
  ['an address with a leading zero', range('04096', 0, 4096), 'ranges[0].base_host_virt_addr'],
  ['an offset beyond 2^53', range('4096', '9007199254740992', 4096), 'ranges[0].image_offset'],
  ['a missing length', '{"base_host_virt_addr":0,"image_offset":0}', 'ranges[0].length'],
  ['a range that is no object', '7', 'ranges[0]'],
  ['overlapping ranges', `${range('4096', 0, 8192)},${range('8192', 4096, 4096)}`, 'ranges'],
  [
    'contradicting addresses',
    `${range('65536', 0, 4096)},${range('655360', 4096, 4096)},${range('73728', 8192, 4096)}`,
    'ranges',
  ],
  [
    'one address for two parts',
    `${range('65536', 0, 4096)},${range('65536', 8192, 4096)}`,
    'ranges',
  ],
])('%s is refused, naming the field', (_, list, field) => {
  expect(failure(() => decodeDirtyRanges(ranges(list), 'x'))).toMatchObject({
    kind: 'vmm-bad-answer',
    field,
  });
});

test.each([
  ['page_size', ranges('', 1024 * PAGE, 1000)],
  ['page_size', ranges('', 1024 * PAGE, 0)],
  ['memory_size', ranges('', 0)],
  ['memory_size', ranges('', 4097)],
  ['memory_size', ranges('', 2 ** 50)],
  ['memory_size', Buffer.from('{"page_size":4096,"ranges":[]}')],
  ['ranges', Buffer.from('{"page_size":4096,"memory_size":4096}')],
  ['ranges', Buffer.from('{"page_size":4096,"memory_size":4096,"ranges":[')],
  ['', Buffer.from('{"page_size":4096,"memory_size":4096,"ranges":[]} x')],
  ['', Buffer.from('')],
  ['deep', Buffer.from(`{"deep":${'['.repeat(100_000)}`)],
])('a bad %s is refused', (field, text) => {
  const error = failure(() => decodeDirtyRanges(text, 'x'));
  expect(error.kind).toBe('vmm-bad-answer');
  expect(error.field).toBe(field);
});

interface Mapping {
  readonly host?: bigint;
  readonly size: number | bigint;
  readonly offset: number;
  readonly page?: number;
}

function mappingsOf(list: readonly Mapping[]): ReturnType<typeof decodeMappings> {
  const rows = list.map((m, i) => {
    const host = m.host ?? BigInt(i + 1) << 40n;
    const { size, offset, page = PAGE } = m;
    return `{"base_host_virt_addr":${host},"size":${size},"offset":${offset},"page_size":${page}}`;
  });
  const parsed = parseExact(`{"mappings":[${rows.join(',')}]}`, 'x');
  if (!parsed.ok) throw new Error(parsed.error.message);
  const answer = checked(memoryMappings, parsed.value, 'x');
  return answer.ok ? decodeMappings(answer.value, 'x') : answer;
}

function goodMappings(list: readonly Mapping[]): Mappings {
  const mappings = mappingsOf(list);
  if (!mappings.ok) throw new Error(mappings.error.message);
  return mappings.value;
}

function bits(words: readonly (bigint | string)[], mappings: Mappings): PageBitmap {
  const text = Buffer.from(`{"bitmap":[${words.join(',')}]}`);
  return decodePageBits(text, ['bitmap'], mappings, 'x').bitmap;
}

test('a region of 65 pages takes two words, and the next region starts at a word', () => {
  const mappings = goodMappings([
    { size: 65 * PAGE, offset: 0 },
    { size: 3 * PAGE, offset: 65 * PAGE },
  ]);
  const bitmap = bits([1n << 63n, 1n, 0b101n], mappings);
  expect(bitmap.pageCount).toBe(68);
  expect(pagesOf(bitmap)).toEqual([63, 64, 65, 67]);
});

test('a bit past the 65th page is refused', () => {
  const mappings = goodMappings([{ size: 65 * PAGE, offset: 0 }]);
  expect(failure(() => bits([0n, 0b10n], mappings))).toMatchObject({
    kind: 'vmm-bad-answer',
    field: 'bitmap[1]',
  });
});

test('a bitmap one word short or long is refused', () => {
  const mappings = goodMappings([{ size: 128 * PAGE, offset: 0 }]);
  for (const words of [[0n], [0n, 0n, 0n], []]) {
    const error = failure(() => bits(words, mappings));
    expect(error).toMatchObject({ kind: 'vmm-bad-answer', field: 'bitmap' });
    expect(error.message).toContain('2 words');
  }
});

test.each(['-1', '1.0', '1e3', '18446744073709551616', '"1"', 'null', '01'])(
  'the word %s is refused',
  (word) => {
    const mappings = goodMappings([{ size: 64 * PAGE, offset: 0 }]);
    expect(failure(() => bits([word], mappings))).toMatchObject({
      kind: 'vmm-bad-answer',
      field: 'bitmap[0]',
    });
  },
);

test('every bit of a word survives', () => {
  const mappings = goodMappings([{ size: 64 * PAGE, offset: 0 }]);
  for (let bit = 0; bit < 64; bit += 1) {
    expect(pagesOf(bits([(1n << BigInt(bit)) | 1n], mappings))).toEqual(bit === 0 ? [0] : [0, bit]);
  }
  expect(countPages(bits([2n ** 64n - 1n], mappings))).toBe(64);
});

test('regions out of order keep the order of their bits', () => {
  const mappings = goodMappings([
    { size: 64 * PAGE, offset: 64 * PAGE },
    { size: 64 * PAGE, offset: 0 },
  ]);
  expect(pagesOf(bits([1n, 2n], mappings))).toEqual([1, 64]);
});

test('pages of 2 MiB expand to 512 pages each', () => {
  const huge = 2 * 1024 * 1024;
  const mappings = goodMappings([{ size: 4 * huge, offset: 0, page: huge }]);
  const bitmap = bits([0b0010n], mappings);
  expect(bitmap.pageCount).toBe(2048);
  expect(countPages(bitmap)).toBe(512);
  expect(hasPage(bitmap, 512) && hasPage(bitmap, 1023)).toBe(true);
  expect(failure(() => bits([0b1_0000n], mappings)).field).toBe('bitmap[0]');
});

test('a bitmap for 4 KiB pages does not fit mappings of 2 MiB pages, nor the other way', () => {
  const huge = 2 * 1024 * 1024;
  const hugeMappings = goodMappings([{ size: 4 * huge, offset: 0, page: huge }]);
  const words = Array.from({ length: 32 }, () => 0n);
  expect(failure(() => bits(words, hugeMappings)).message).toContain('too long');
  const small = goodMappings([{ size: 4 * huge, offset: 0 }]);
  expect(failure(() => bits([0n], small)).message).toContain('too short');
});

test.each([
  ['no region', [], 'mappings'],
  ['an empty region', [{ size: 0, offset: 0 }], 'mappings[0].size'],
  [
    'a gap',
    [
      { size: PAGE, offset: 0 },
      { size: PAGE, offset: 2 * PAGE },
    ],
    'mappings',
  ],
  [
    'an overlap',
    [
      { size: 2 * PAGE, offset: 0 },
      { size: PAGE, offset: PAGE },
    ],
    'mappings',
  ],
  ['a start past 0', [{ size: PAGE, offset: PAGE }], 'mappings'],
  ['half a page', [{ size: 2048, offset: 0 }], 'mappings[0].size'],
  ['an odd page size', [{ size: PAGE, offset: 0, page: 4095 }], 'mappings[0].page_size'],
  ['a small page size', [{ size: PAGE, offset: 0, page: 2048 }], 'mappings[0].page_size'],
  ['a huge page in part', [{ size: PAGE, offset: 0, page: 2 ** 21 }], 'mappings[0].size'],
  ['an address within a page', [{ host: 1n, size: PAGE, offset: 0 }], 'mappings[0]'],
  ['an end past 2^64', [{ host: 2n ** 64n - 4096n, size: 8192, offset: 0 }], 'mappings[0]'],
  ['a size beyond 2^53', [{ size: 2n ** 60n, offset: 0 }], 'mappings[0].size'],
  [
    'one address twice',
    [
      { host: 4096n, size: 8192, offset: 0 },
      { host: 8192n, size: 8192, offset: 8192 },
    ],
    'mappings',
  ],
])('mappings with %s are refused', (_, list: readonly Mapping[], field) => {
  const mappings = mappingsOf(list);
  expect(mappings).toMatchObject({ ok: false, error: { kind: 'vmm-bad-answer', field } });
});

test('host addresses of mappings above 2^53 are exact', () => {
  const host = 2n ** 62n + 2n ** 53n + 4096n;
  const mappings = goodMappings([{ host, size: PAGE, offset: 0 }]);
  expect(mappings.layout.regions[0]?.hostAddress).toBe(host);
});
