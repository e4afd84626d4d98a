/**
 * Whether a memory file and a paused VM's memory are the same at the same image offsets: proves a
 * layout that the address map only suggests, since two regions side by side look like one.
 */
import { open } from 'node:fs/promises';
import type { MemoryLayout, PageBitmap } from '../memory.ts';
import { bitmapCount, coalesceBatch, readProcess } from '../native/guest.ts';
import { PAGE_BYTES } from '../units.ts';
import { emptyBitmap, hasPage, setPages } from './bitmap.ts';
import { layoutRows } from './layout.ts';

const SAMPLES_MAX = 64;

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
  const sample = spread(pages);
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
  const here = await readFilePages(path, rows);
  const telling = tellingPages(here);
  if (telling.length === 0) return 'unknown';
  const same = telling.every((page) => {
    const start = page * PAGE_BYTES;
    const end = start + PAGE_BYTES;
    return here.subarray(start, end).equals(there.subarray(start, end));
  });
  return same ? 'same' : 'different';
}

/** Up to `SAMPLES_MAX` of the set pages, evenly over the set. */
function spread(pages: PageBitmap): PageBitmap {
  const sample = emptyBitmap(pages.pageCount);
  const step = Math.max(1, Math.ceil(bitmapCount(pages.bits) / SAMPLES_MAX));
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

/** The rows are one page each, ascending. */
async function readFilePages(path: string, rows: BigUint64Array): Promise<Buffer> {
  const count = rows.length / 3;
  const bytes = Buffer.alloc(count * PAGE_BYTES);
  const file = await open(path, 'r');
  try {
    for (let row = 0; row < count; row += 1) {
      const offset = Number(rows[row * 3 + 1] ?? 0n);
      await file.read(bytes, row * PAGE_BYTES, PAGE_BYTES, offset);
    }
  } finally {
    await file.close();
  }
  return bytes;
}

/** Pages that are not zero and like no other page of the sample. */
function tellingPages(bytes: Buffer): number[] {
  const zero = Buffer.alloc(PAGE_BYTES);
  const pages = Array.from({ length: bytes.length / PAGE_BYTES }, (_, page) =>
    bytes.subarray(page * PAGE_BYTES, (page + 1) * PAGE_BYTES),
  );
  return pages.flatMap((page, index) => {
    if (page.equals(zero)) return [];
    const alone = pages.every((other, at) => at === index || !other.equals(page));
    return alone ? [index] : [];
  });
}
