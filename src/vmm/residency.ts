/**
 * Page tables seen from outside (PAGEMAP_SCAN): which pages of the guest are there, present or
 * swapped, and which are private to the VM. One question, one answer per page: nothing is declared
 * clean by combining two reads that the kernel may have moved pages between.
 */
import type { MemoryLayout, PageBitmap } from '../memory.ts';
import { errnoName, pagemapScan, type PagemapMode } from '../native/guest.ts';
import { err, ok, type Result } from '../result.ts';
import { PAGE_BYTES, pageCount, pagesExact } from '../units.ts';
import { notPermitted, type BackedSpan, type Backing } from './address-map.ts';
import { emptyBitmap, setPages } from './bitmap.ts';
import { vmmError, type VmmError } from './errors.ts';
import { isGone } from './process-life.ts';

/** Guest memory looked at per call: a few milliseconds where all of it is there. */
const SCAN_BYTES = 2 ** 30;

/**
 * @param mode `resident` = present or swapped; `private` = that, and not a page of the mapped file;
 *   `zero` = the kernel's zero page (none are found before Linux 6.7)
 */
export async function scanPages(
  pid: number,
  layout: MemoryLayout,
  mode: PagemapMode,
  signal: AbortSignal,
): Promise<Result<PageBitmap, VmmError>> {
  const image = emptyBitmap(pagesExact(layout.imageBytes));
  for (let start = 0; start < layout.imageBytes; start += SCAN_BYTES) {
    const length = Math.min(SCAN_BYTES, layout.imageBytes - start);
    const pages = pageCount(length / PAGE_BYTES);
    const regions = rowsWithin(layout, start, length);
    const scanned = pagemapScan({ pid, regions, pageCount: pages, mode });
    if (scanned.error !== 0) return err(scanError(pid, scanned.error));
    image.bits.set(scanned.bits, start / PAGE_BYTES / 8);
    if (start + SCAN_BYTES < layout.imageBytes) {
      await new Promise((resolve) => setImmediate(resolve));
      signal.throwIfAborted();
    }
  }
  return ok(image);
}

/** The layout's rows within a window of the image, with offsets from the window's start. */
function rowsWithin(layout: MemoryLayout, start: number, length: number): BigUint64Array {
  const rows: bigint[] = [];
  for (const region of layout.regions) {
    const from = Math.max(start, region.imageOffset);
    const to = Math.min(start + length, region.imageOffset + region.length);
    if (from >= to) continue;
    const host = region.hostAddress + BigInt(from - region.imageOffset);
    rows.push(BigInt(from - start), BigInt(to - from), host);
  }
  return BigUint64Array.from(rows);
}

function scanError(pid: number, error: number): VmmError {
  const code = errnoName(error);
  if (code === 'ESRCH' || (code === 'ENOENT' && isGone(pid))) {
    return vmmError('vm-exited', `the VM exited (pid ${pid})`, { code });
  }
  if (code === 'EPERM' || code === 'EACCES' || code === 'ENOENT') {
    return notPermitted(`read the page map of pid ${pid}`, code);
  }
  const busy = ['EMFILE', 'ENFILE', 'ENOMEM', 'EINTR', 'EAGAIN'].includes(code);
  const message = `the page map of pid ${pid} cannot be read (${code})`;
  if (busy) return vmmError('vmm-unreachable', message, { code });
  return vmmError('tracking-unsupported', message, { code });
}

/** The pages of the image that have one of these backings. */
export function pagesBacked(
  layout: MemoryLayout,
  spans: readonly BackedSpan[],
  backings: readonly Backing[],
): PageBitmap {
  const pages = emptyBitmap(pagesExact(layout.imageBytes));
  for (const span of spans) {
    if (!backings.includes(span.backing)) continue;
    setPages(pages.bits, span.imageOffset / PAGE_BYTES, span.length / PAGE_BYTES);
  }
  return pages;
}
