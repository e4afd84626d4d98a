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
import { emptyBitmap } from '../vmm/bitmap.ts';

export interface PageSets {
  readonly selected: PageBitmap;
  /** Pages known to read zero now; null where the source does not know of any. */
  readonly zero: PageBitmap | null;
}

/** Size of a bitmap's bytes: whole 64-bit words. */
export const bitmapBytes = (count: PageCount): number => Math.ceil(count / 64) * 8;

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

function bitsIn(word: number): number {
  let v = word - ((word >>> 1) & 0x55555555);
  v = (v & 0x33333333) + ((v >>> 2) & 0x33333333);
  return Math.imul((v + (v >>> 4)) & 0x0f0f0f0f, 0x01010101) >>> 24;
}

/*
 * Stored form: magic u32 | page count u64 | 2 bits per 512-byte block, four to a byte | the blocks that
 * have bytes, in order. Little-endian. Block kinds: 0 all zeros, 1 all ones, 2 literal, 3 list (count
 * u16, then the position of each set bit, u16). A 64 GiB guest takes a kilobyte and two bytes per page
 * of a sparse set; at worst the bitmap and 0.05 %.
 */
const MAGIC = 0x31425056;
const HEADER_BYTES = 12;
const BLOCK_BYTES = 512;
const WORDS_PER_BLOCK = BLOCK_BYTES / 4;
/** More than this and the list would be as long as the literal. */
const LISTED_MAX = 200;
type BlockKind = 0 | 1 | 2 | 3;

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
    } else if (kind === 3) {
      at = writeList(words, first, last, head, at);
    }
  }
  return out.subarray(0, at);
}

function blockKind(words: Uint32Array, first: number, last: number): BlockKind {
  const sample = words[first] ?? 0;
  let same = true;
  let set = 0;
  for (let i = first; i < last; i += 1) {
    const word = words[i] ?? 0;
    same &&= word === sample;
    if (word !== 0) set += bitsIn(word);
  }
  if (same && sample === 0) return 0;
  if (same && sample === 0xffffffff) return 1;
  // The last block may be short, and its list longer than its literal would be.
  return set <= LISTED_MAX && last - first === WORDS_PER_BLOCK ? 3 : 2;
}

function writeList(
  words: Uint32Array,
  first: number,
  last: number,
  into: DataView,
  start: number,
): number {
  let at = start + 2;
  for (let i = first; i < last; i += 1) {
    let word = words[i] ?? 0;
    while (word !== 0) {
      const bit = 31 - Math.clz32(word & -word);
      into.setUint16(at, (i - first) * 32 + bit, true);
      at += 2;
      word &= word - 1;
    }
  }
  into.setUint16(start, (at - start - 2) / 2, true);
  return at;
}

/** Throws RangeError where the stored form is damaged. */
export function decodeBitmap(stored: Uint8Array): PageBitmap {
  const view = new DataView(stored.buffer, stored.byteOffset, stored.byteLength);
  if (stored.length < HEADER_BYTES || view.getUint32(0, true) !== MAGIC) {
    throw new RangeError('stored page bitmap: wrong magic');
  }
  const count = toPageCount(Number(view.getBigUint64(4, true)));
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
    if (kind === 2) at = readLiteral(stored, at, bits.subarray(first, last));
    if (kind === 3) at = readList(view, at, bits.subarray(first, last));
  }
  if (at !== stored.length) throw new RangeError('stored page bitmap: bytes past its end');
  return { pageCount: count, bits };
}

function readLiteral(stored: Uint8Array, at: number, into: Uint8Array): number {
  const end = at + into.length;
  if (stored.length < end) throw new RangeError('stored page bitmap: cut short');
  into.set(stored.subarray(at, end));
  return end;
}

function readList(view: DataView, at: number, into: Uint8Array): number {
  if (view.byteLength < at + 2) throw new RangeError('stored page bitmap: cut short');
  const end = at + 2 + view.getUint16(at, true) * 2;
  if (view.byteLength < end) throw new RangeError('stored page bitmap: cut short');
  for (let entry = at + 2; entry < end; entry += 2) {
    const bit = view.getUint16(entry, true);
    if (bit >> 3 >= into.length) throw new RangeError('stored page bitmap: a page past its block');
    into[bit >> 3] = (into[bit >> 3] ?? 0) | (1 << (bit & 7));
  }
  return end;
}

/**
 * Runs each loop above often enough to be compiled, in about 10 ms: the first capture of a large guest
 * would otherwise spend ten times as long in them, with the VM paused.
 */
export function warmUp(): void {
  const count = toPageCount(1 << 19);
  const sets = { selected: emptyBitmap(count), zero: emptyBitmap(count) };
  for (let i = 0; i < sets.selected.bits.length; i += 97) sets.selected.bits[i] = i;
  for (let round = 0; round < 4; round += 1) {
    const joined = joinSets(sets, sets);
    joinSets({ selected: joined.selected, zero: null }, sets);
    decodeBitmap(encodeBitmap(joined.selected));
  }
}
