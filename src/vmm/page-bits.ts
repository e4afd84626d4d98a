/**
 * The answers to `GET /memory/mappings`, `/memory` and `/memory/dirty` (dialect `e2b`): bitmaps as
 * arrays of 64-bit words, least significant bit first, one bit per page of each region's own page
 * size, each region starting at a new word, in the order of the mappings.
 */
import type { MemoryLayout, MemoryRegion, PageBitmap } from '../memory.ts';
import { err, ok, type Result } from '../result.ts';
import { PAGE_BYTES, bytes, hostAddress, guestAddress, pagesExact } from '../units.ts';
import type { MemoryMappings } from './answers.ts';
import { emptyBitmap, placeBits, setPages } from './bitmap.ts';
import { badAnswer, type VmmError } from './errors.ts';
import { JsonScanner } from './json-scan.ts';
import { buildLayout, isPageSize } from './layout.ts';

const WORD_BITS = 64;

/** One region as its bits are laid out. */
export interface BitRegion {
  readonly imageOffset: number;
  readonly length: number;
  readonly pageBytes: number;
}

export interface Mappings {
  readonly layout: MemoryLayout;
  /** In the order of the answer, which is the order of the bits. */
  readonly bitRegions: readonly BitRegion[];
}

/** Checks the mappings: page sizes, whole pages, no gap, no overlap, nothing empty. */
export function decodeMappings(answer: MemoryMappings, what: string): Result<Mappings, VmmError> {
  const regions: MemoryRegion[] = [];
  const bitRegions: BitRegion[] = [];
  for (const [index, mapping] of answer.mappings.entries()) {
    const bad = (field: string, problem: string): Result<never, VmmError> =>
      err(badAnswer(what, `mappings[${index}].${field}`, problem));
    const imageOffset = Number(mapping.offset);
    const length = Number(mapping.size);
    const pageBytes = Number(mapping.page_size);
    if (!Number.isSafeInteger(imageOffset)) return bad('offset', 'is beyond 2^53');
    if (!Number.isSafeInteger(length)) return bad('size', 'is beyond 2^53');
    if (length === 0) return bad('size', 'is 0');
    if (!isPageSize(pageBytes)) {
      return bad('page_size', `of ${mapping.page_size} bytes is not supported`);
    }
    if (length % pageBytes !== 0) {
      return bad('size', `${length} is not whole pages of ${pageBytes} bytes`);
    }
    regions.push({
      guestAddress:
        mapping.guest_phys_addr === undefined ? null : guestAddress(mapping.guest_phys_addr),
      hostAddress: hostAddress(mapping.base_host_virt_addr),
      imageOffset: bytes(imageOffset),
      length: bytes(length),
    });
    bitRegions.push({ imageOffset, length, pageBytes });
  }
  const layout = buildLayout(regions, what, 'mappings');
  return layout.ok ? ok({ layout: layout.value, bitRegions }) : layout;
}

/**
 * Reads the bitmaps named by `fields` from one answer, as bits per 4 KiB page of the image.
 * @throws Failure<VmmError> `vmm-bad-answer` when one is missing, too short, too long, or has bits
 *   set past the end of a region
 */
export function decodePageBits<Field extends string>(
  text: Uint8Array,
  fields: readonly Field[],
  mappings: Mappings,
  what: string,
): Record<Field, PageBitmap> {
  const scan: JsonScanner = new JsonScanner(text, what);
  const found: Partial<Record<string, PageBitmap>> = {};
  scan.object('', (key) => {
    if (!fields.some((field) => field === key)) scan.skip(key);
    else if (found[key] !== undefined) scan.fail(key, 'is there twice');
    else found[key] = readBits(scan, key, mappings);
  });
  scan.end();
  for (const field of fields) if (found[field] === undefined) scan.fail(field, 'is missing');
  return found as Record<Field, PageBitmap>;
}

function readBits(scan: JsonScanner, field: string, mappings: Mappings): PageBitmap {
  const words = mappings.bitRegions.map((r) => Math.ceil(r.length / r.pageBytes / WORD_BITS));
  const wordCount = words.reduce((sum, count) => sum + count, 0);
  const halves = new Uint32Array(wordCount * 2);
  let read = 0;
  scan.array(field, (index) => {
    if (index >= wordCount) {
      scan.fail(field, `is too long: the mappings take ${wordCount} words of 64 bits`);
    }
    scan.u64(() => `${field}[${index}]`);
    halves[index * 2] = scan.low;
    halves[index * 2 + 1] = scan.high;
    read = index + 1;
  });
  if (read < wordCount) {
    scan.fail(field, `is too short (${read}): the mappings take ${wordCount} words of 64 bits`);
  }
  const image = emptyBitmap(pagesExact(mappings.layout.imageBytes));
  const all = new Uint8Array(halves.buffer);
  let firstWord = 0;
  for (const [index, region] of mappings.bitRegions.entries()) {
    const bits = all.subarray(firstWord * 8, (firstWord + (words[index] ?? 0)) * 8);
    const pages = region.length / region.pageBytes;
    checkTail(scan, field, bits, pages, index, firstWord);
    place(image, region, bits, pages);
    firstWord += words[index] ?? 0;
  }
  return image;
}

/** Bits past the region's last page: the VMM counts pages otherwise than we do. */
function checkTail(
  scan: JsonScanner,
  field: string,
  bits: Uint8Array,
  pages: number,
  region: number,
  firstWord: number,
): void {
  for (let bit = pages; bit < bits.length * 8; bit += 1) {
    if ((((bits[Math.floor(bit / 8)] ?? 0) >> (bit % 8)) & 1) === 0) continue;
    const word = firstWord + Math.floor(bit / WORD_BITS);
    const text = `has bit ${bit % WORD_BITS} set, past the ${pages} pages of mappings[${region}]`;
    scan.fail(`${field}[${word}]`, text);
  }
}

function place(image: PageBitmap, region: BitRegion, bits: Uint8Array, pages: number): void {
  const firstPage = region.imageOffset / PAGE_BYTES;
  if (region.pageBytes === PAGE_BYTES) {
    placeBits(image.bits, firstPage, bits, pages);
    return;
  }
  const each = region.pageBytes / PAGE_BYTES;
  for (let bit = 0; bit < pages; bit += 1) {
    if ((((bits[Math.floor(bit / 8)] ?? 0) >> (bit % 8)) & 1) === 1) {
      setPages(image.bits, firstPage + bit * each, each);
    }
  }
}
