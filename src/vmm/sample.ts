/**
 * Whether a memory file and a paused VM's memory are the same at the same image offsets: proves a
 * layout that the address map only suggests, since two regions side by side look like one.
 */
import { constants } from 'node:fs';
import { open } from 'node:fs/promises';
import type { MemoryLayout, PageBitmap } from '../memory.ts';
import { bitmapAnd, bitmapCount, coalesceBatch, readProcess } from '../native/guest.ts';
import { PAGE_BYTES } from '../units.ts';
import { emptyBitmap, hasPage, setPages } from './bitmap.ts';
import { layoutRows } from './layout.ts';

const SAMPLES_MAX = 64;

/** A page of a memory file that is not zero and unlike the others of its sample. */
export interface TellingPage {
  /** Page of the image. */
  readonly page: number;
  readonly bytes: Buffer;
}

/**
 * Pages that tell places apart, of a sample spread over a part of the image.
 * @param pages what the file has
 * @param part image pages, end exclusive
 */
export async function tellingSample(
  path: string,
  pages: PageBitmap,
  part: { readonly first: number; readonly end: number },
  samplesMax: number,
): Promise<readonly TellingPage[]> {
  const within = emptyBitmap(pages.pageCount);
  setPages(within.bits, part.first, part.end - part.first);
  bitmapAnd(within.bits, pages.bits);
  const chosen = pagesIn(spread(within, samplesMax));
  const bytes = await readFilePages(path, chosen);
  return tellingPages(bytes).map((at) => ({
    page: chosen[at] ?? 0,
    bytes: bytes.subarray(at * PAGE_BYTES, (at + 1) * PAGE_BYTES),
  }));
}

function pagesIn(pages: PageBitmap): readonly number[] {
  const found: number[] = [];
  for (let page = 0; page < pages.pageCount; page += 1) if (hasPage(pages, page)) found.push(page);
  return found;
}

/**
 * `unknown`: no page of the sample tells places apart (all zero, or alike).
 * @param pages what the file has; a spread of them is compared
 */
export async function sameBytes(
  pid: number,
  layout: MemoryLayout,
  path: string,
  pages: PageBitmap,
): Promise<'same' | 'different' | 'unknown'> {
  const sample = spread(pages, SAMPLES_MAX);
  const count = bitmapCount(sample.bits);
  if (count === 0) return 'unknown';
  const there = Buffer.alloc(count * PAGE_BYTES);
  const { rows } = coalesceBatch({
    bits: sample.bits,
    pageCount: sample.pageCount,
    fromPage: 0,
    regions: layoutRows(layout),
    batchBytes: there.length,
    maxRows: count,
    maxSegmentBytes: PAGE_BYTES,
    joinGapPages: 0,
  });
  const read = readProcess({
    pid,
    rows,
    dest: there,
    from: 0,
    cancel: new Int32Array(new SharedArrayBuffer(4)),
    cancelIndex: 0,
    enomemDeadlineMs: 100,
  });
  if (!read.done) return 'different';
  const here = await readFilePages(path, pagesIn(sample));
  const telling = tellingPages(here);
  if (telling.length === 0) return 'unknown';
  const same = telling.every((page) => {
    const start = page * PAGE_BYTES;
    const end = start + PAGE_BYTES;
    return here.subarray(start, end).equals(there.subarray(start, end));
  });
  return same ? 'same' : 'different';
}

/** Up to so many of the set pages, evenly over the set. */
function spread(pages: PageBitmap, samplesMax: number): PageBitmap {
  const sample = emptyBitmap(pages.pageCount);
  const step = Math.max(1, Math.ceil(bitmapCount(pages.bits) / samplesMax));
  let seen = 0;
  for (let byte = 0; byte < pages.bits.length; byte += 1) {
    if (pages.bits[byte] === 0) continue;
    for (let page = byte * 8; page < byte * 8 + 8; page += 1) {
      if (!hasPage(pages, page)) continue;
      if (seen % step === 0) setPages(sample.bits, page, 1);
      seen += 1;
    }
  }
  return sample;
}

/** One after the other. */
async function readFilePages(path: string, pages: readonly number[]): Promise<Buffer> {
  const bytes = Buffer.alloc(pages.length * PAGE_BYTES);
  // Looked at when its extents were read; whatever is there now, nobody waits for it.
  const { O_RDONLY, O_NOFOLLOW, O_NONBLOCK } = constants;
  const file = await open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
  try {
    for (const [at, page] of pages.entries()) {
      await file.read(bytes, at * PAGE_BYTES, PAGE_BYTES, page * PAGE_BYTES);
    }
  } finally {
    await file.close();
  }
  return bytes;
}

/** Which are not zero and like no other. */
function tellingPages(bytes: Buffer): number[] {
  const seen = new Map<string, number>();
  const keys = Array.from({ length: bytes.length / PAGE_BYTES }, (_, at) => {
    const key = bytes.toString('latin1', at * PAGE_BYTES, (at + 1) * PAGE_BYTES);
    seen.set(key, (seen.get(key) ?? 0) + 1);
    return key;
  });
  const zero = '\0'.repeat(PAGE_BYTES);
  return keys.flatMap((key, at) => (key !== zero && seen.get(key) === 1 ? [at] : []));
}
