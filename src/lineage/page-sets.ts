/**
 * Sets of pages and how they join. What a source says is two sets: `selected` (read these) and `zero`
 * (these read zero now). Invariants, each enforced by test/lineage/page-sets.test.ts:
 *
 * - S1 The two sets of a joined result are disjoint; a page in both of one fetch is selected: reading
 *      a page now is always right.
 * - S2 The newest fetch says what a page is now: selected there → selected, zero there → zero.
 * - S3 A page that only older entries name, in either of their sets, is selected: it is read now, and
 *      a read gives the current content whatever happened since.
 * - S4 No page named by the newest fetch or by any older entry is missing from the result.
 */
import type { PageBitmap } from '../memory.ts';
import { assert } from '../result.ts';
import { pageCount as toPageCount } from '../units.ts';
import type { PageCount } from '../units.ts';

export interface PageSets {
  readonly selected: PageBitmap;
  /** Pages known to read zero now; null where the source does not know of any. */
  readonly zero: PageBitmap | null;
}

/** Size of a bitmap's bytes: whole 64-bit words. */
export const bitmapBytes = (count: PageCount): number => Math.ceil(count / 64) * 8;

export function emptyBitmap(count: PageCount): PageBitmap {
  return { pageCount: count, bits: new Uint8Array(bitmapBytes(count)) };
}

/** What is wrong with a bitmap (length, or bits past its end), or null. */
export function bitmapProblem(bitmap: PageBitmap): string | null {
  const want = bitmapBytes(bitmap.pageCount);
  if (bitmap.bits.length !== want) {
    return `bitmap of ${bitmap.pageCount} pages has ${bitmap.bits.length} bytes, not ${want}`;
  }
  for (let page: number = bitmap.pageCount; page < want * 8; page += 1) {
    if (((bitmap.bits[page >> 3] ?? 0) >> (page & 7)) & 1) {
      return `bitmap of ${bitmap.pageCount} pages has bit ${page} set, past its end`;
    }
  }
  return null;
}

/** The bits as 32-bit words: a view where the alignment allows it, else a copy. */
function wordsOf(bits: Uint8Array): Uint32Array {
  if (bits.byteOffset % 4 === 0) {
    return new Uint32Array(bits.buffer, bits.byteOffset, bits.byteLength / 4);
  }
  return new Uint32Array(bits.slice().buffer);
}

/** The newest fetch joined with what earlier, uncommitted epochs left in the ledger (S1 to S4). */
export function joinSets(newest: PageSets, older: PageSets | null): PageSets {
  const { pageCount } = newest.selected;
  assert(older === null || older.selected.pageCount === pageCount, 'sets of one image join');
  const selected = emptyBitmap(pageCount);
  const into = wordsOf(selected.bits);
  into.set(wordsOf(newest.selected.bits));
  const newestZero = newest.zero === null ? null : wordsOf(newest.zero.bits);
  const olderSelected = older === null ? null : wordsOf(older.selected.bits);
  const olderZero = older === null || older.zero === null ? null : wordsOf(older.zero.bits);
  if (newestZero === null) {
    if (olderSelected !== null) orInto(into, olderSelected);
    if (olderZero !== null) orInto(into, olderZero);
    return { selected, zero: null };
  }
  const zero = emptyBitmap(pageCount);
  const zeroWords = wordsOf(zero.bits);
  for (let i = 0; i < into.length; i += 1) {
    const read = into[i] ?? 0;
    const known = (newestZero[i] ?? 0) & ~read;
    const old = (olderSelected?.[i] ?? 0) | (olderZero?.[i] ?? 0);
    zeroWords[i] = known;
    into[i] = read | (old & ~known);
  }
  return { selected, zero };
}

function orInto(into: Uint32Array, from: Uint32Array): void {
  for (let i = 0; i < into.length; i += 1) into[i] = (into[i] ?? 0) | (from[i] ?? 0);
}

/** How many pages a bitmap names. */
export function countPages(bitmap: PageBitmap): PageCount {
  let total = 0;
  for (const word of wordsOf(bitmap.bits)) {
    if (word === 0) continue;
    let v = word - ((word >>> 1) & 0x55555555);
    v = (v & 0x33333333) + ((v >>> 2) & 0x33333333);
    total += Math.imul((v + (v >>> 4)) & 0x0f0f0f0f, 0x01010101) >>> 24;
  }
  return toPageCount(total);
}

/*
 * Stored form: magic u32 | page count u64 | 2 bits per 512-byte block (0 all zeros, 1 all ones,
 * 2 literal), four to a byte | the literal blocks. Little-endian. Sparse and full sets of a 64 GiB
 * guest take a kilobyte; the worst case is the bitmap and 0.05 %.
 */
const MAGIC = 0x31425056;
const HEADER_BYTES = 12;
const BLOCK_BYTES = 512;
const WORDS_PER_BLOCK = BLOCK_BYTES / 4;

export function encodeBitmap(bitmap: PageBitmap): Uint8Array {
  const size = bitmap.bits.length;
  const words = wordsOf(bitmap.bits);
  const blocks = Math.ceil(size / BLOCK_BYTES);
  const kindBytes = Math.ceil(blocks / 4);
  const out = new Uint8Array(HEADER_BYTES + kindBytes + size);
  const head = new DataView(out.buffer);
  head.setUint32(0, MAGIC, true);
  head.setBigUint64(4, BigInt(bitmap.pageCount), true);
  let at = HEADER_BYTES + kindBytes;
  for (let block = 0; block < blocks; block += 1) {
    const first = block * WORDS_PER_BLOCK;
    const last = Math.min(first + WORDS_PER_BLOCK, words.length);
    const kind = blockKind(words, first, last);
    const slot = HEADER_BYTES + (block >> 2);
    out[slot] = (out[slot] ?? 0) | (kind << ((block & 3) * 2));
    if (kind === 2) {
      out.set(bitmap.bits.subarray(first * 4, last * 4), at);
      at += (last - first) * 4;
    }
  }
  return out.subarray(0, at);
}

function blockKind(words: Uint32Array, first: number, last: number): 0 | 1 | 2 {
  const sample = words[first] ?? 0;
  if (sample !== 0 && sample !== 0xffffffff) return 2;
  for (let i = first + 1; i < last; i += 1) if (words[i] !== sample) return 2;
  return sample === 0 ? 0 : 1;
}

/** Throws RangeError where the stored form is damaged. */
export function decodeBitmap(stored: Uint8Array): PageBitmap {
  const head = new DataView(stored.buffer, stored.byteOffset, stored.byteLength);
  if (stored.length < HEADER_BYTES || head.getUint32(0, true) !== MAGIC) {
    throw new RangeError('stored page bitmap: wrong magic');
  }
  const count = toPageCount(Number(head.getBigUint64(4, true)));
  const size = bitmapBytes(count);
  const blocks = Math.ceil(size / BLOCK_BYTES);
  let at = HEADER_BYTES + Math.ceil(blocks / 4);
  if (stored.length < at) throw new RangeError('stored page bitmap: cut short');
  const bits = new Uint8Array(size);
  for (let block = 0; block < blocks; block += 1) {
    const kind = ((stored[HEADER_BYTES + (block >> 2)] ?? 0) >> ((block & 3) * 2)) & 3;
    const first = block * BLOCK_BYTES;
    const last = Math.min(first + BLOCK_BYTES, size);
    if (kind === 1) bits.fill(0xff, first, last);
    if (kind !== 2) continue;
    if (stored.length < at + last - first) throw new RangeError('stored page bitmap: cut short');
    bits.set(stored.subarray(at, at + last - first), first);
    at += last - first;
  }
  if (at !== stored.length) throw new RangeError('stored page bitmap: bytes past its end');
  return { pageCount: count, bits };
}
