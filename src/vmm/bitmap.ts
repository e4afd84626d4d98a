/**
 * Page bitmaps: one bit per 4 KiB page of the image, least significant first, in whole 64-bit
 * words.
 */
import type { PageBitmap } from '../memory.ts';
import { bitmapAnd, bitmapAndNot, bitmapCount, bitmapOr } from '../native/guest.ts';
import { pageCount, type PageCount } from '../units.ts';

const WORD_PAGES = 64;

export function emptyBitmap(pages: PageCount): PageBitmap {
  return { pageCount: pages, bits: new Uint8Array(Math.ceil(pages / WORD_PAGES) * 8) };
}

export function copyBitmap(from: PageBitmap): PageBitmap {
  return { pageCount: from.pageCount, bits: from.bits.slice() };
}

/** All pages of the image. */
export function fullBitmap(pages: PageCount): PageBitmap {
  const bitmap = emptyBitmap(pages);
  setPages(bitmap.bits, 0, pages);
  return bitmap;
}

export const countPages = (bitmap: PageBitmap): PageCount => pageCount(bitmapCount(bitmap.bits));

export function isEmptyBitmap(bitmap: PageBitmap): boolean {
  return bitmapCount(bitmap.bits) === 0;
}

/** Pages of `a` that `b` has not. */
export function without(a: PageBitmap, b: PageBitmap): PageBitmap {
  const result = copyBitmap(a);
  bitmapAndNot(result.bits, b.bits);
  return result;
}

export function union(a: PageBitmap, b: PageBitmap): PageBitmap {
  const result = copyBitmap(a);
  bitmapOr(result.bits, b.bits);
  return result;
}

export function intersection(a: PageBitmap, b: PageBitmap): PageBitmap {
  const result = copyBitmap(a);
  bitmapAnd(result.bits, b.bits);
  return result;
}

/** Sets `count` bits from `first` on. Both may be any; the bits must exist. */
export function setPages(bits: Uint8Array, first: number, count: number): void {
  const end = first + count;
  if (end > bits.length * 8) throw new RangeError(`page ${end} is past the bitmap`);
  let page = first;
  for (; page < end && (page & 7) !== 0; page += 1) setPage(bits, page);
  const wholeBytes = Math.floor((end - page) / 8);
  if (wholeBytes > 0) {
    const firstByte = page / 8;
    bits.fill(0xff, firstByte, firstByte + wholeBytes);
    page += wholeBytes * 8;
  }
  for (; page < end; page += 1) setPage(bits, page);
}

function setPage(bits: Uint8Array, page: number): void {
  // Not `>> 3`: bit operators cut page numbers at 2^31 without saying so.
  const byte = Math.floor(page / 8);
  bits[byte] = (bits[byte] ?? 0) | (1 << (page % 8));
}

export function hasPage(bitmap: PageBitmap, page: number): boolean {
  return (((bitmap.bits[Math.floor(page / 8)] ?? 0) >> (page % 8)) & 1) === 1;
}

/**
 * Copies the first `count` bits of `from` to the bits from `firstPage` on, which must be clear.
 * Regions that start at a whole byte (every multiple of 32 KiB) are copied as bytes.
 */
export function placeBits(
  into: Uint8Array,
  firstPage: number,
  from: Uint8Array,
  count: number,
): void {
  const wholeBytes = Math.floor(count / 8);
  const shift = firstPage % 8;
  const firstByte = (firstPage - shift) / 8;
  if (shift === 0) into.set(from.subarray(0, wholeBytes), firstByte);
  else {
    for (let i = 0; i < wholeBytes; i += 1) {
      const byte = from[i] ?? 0;
      if (byte === 0) continue;
      into[firstByte + i] = (into[firstByte + i] ?? 0) | ((byte << shift) & 0xff);
      into[firstByte + i + 1] = (into[firstByte + i + 1] ?? 0) | (byte >> (8 - shift));
    }
  }
  for (let bit = wholeBytes * 8; bit < count; bit += 1) {
    if ((((from[Math.floor(bit / 8)] ?? 0) >> (bit % 8)) & 1) === 1) setPage(into, firstPage + bit);
  }
}
