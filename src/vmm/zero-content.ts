/**
 * Removed pages that were read since, on kernels where nothing shows it: a read usually maps the
 * shared zero page, which the page map tells apart; where it makes a page of its own, only the
 * content is left.
 */
import type { MemoryLayout, PageBitmap } from '../memory.ts';
import {
  coalesceBatch,
  errnoName,
  pagemapScan,
  readProcess,
  viewAddress,
  zeroPages,
} from '../native/guest.ts';
import { err, ok, type Result } from '../result.ts';
import { MIB, PAGE_BYTES, pageCount } from '../units.ts';
import { emptyBitmap, hasPage, setPages } from './bitmap.ts';
import { vmmError, type VmmError } from './errors.ts';
import { layoutRows } from './layout.ts';

const BATCH_BYTES = 4 * MIB;
const PROBE_PAGES = 1024;

let shown: boolean | undefined;

/**
 * Whether reading a page that was never written shows as the zero page here. Asked of ourselves.
 */
export function kernelShowsZeroPages(): boolean {
  return (shown ??= askKernel());
}

function askKernel(): boolean {
  const fresh = new Uint8Array((PROBE_PAGES + 1) * PAGE_BYTES);
  const start = viewAddress(fresh);
  const skip = (PAGE_BYTES - Number(start % BigInt(PAGE_BYTES))) % PAGE_BYTES;
  const middle = PROBE_PAGES / 2;
  if (fresh[skip + middle * PAGE_BYTES] !== 0) return false;
  const bytes = BigInt(PROBE_PAGES * PAGE_BYTES);
  const regions = BigUint64Array.from([0n, bytes, start + BigInt(skip)]);
  const { pid } = process;
  const scanned = pagemapScan({ pid, regions, pageCount: PROBE_PAGES, mode: 'zero' });
  const bitmap = { pageCount: pageCount(PROBE_PAGES), bits: scanned.bits };
  return scanned.error === 0 && hasPage(bitmap, middle);
}

/**
 * Those of `pages` that are all zero now. Reads them, a few milliseconds at a time: the VM is
 * paused, but the daemon is not.
 */
export async function zeroInMemory(
  pid: number,
  layout: MemoryLayout,
  pages: PageBitmap,
  signal: AbortSignal,
): Promise<Result<PageBitmap, VmmError>> {
  const zero = emptyBitmap(pages.pageCount);
  const dest = new Uint8Array(BATCH_BYTES);
  const cancel = new Int32Array(new SharedArrayBuffer(4));
  const regions = layoutRows(layout);
  for (let fromPage = 0; fromPage < pages.pageCount;) {
    const { rows, bytes, nextPage } = coalesceBatch({
      bits: pages.bits,
      pageCount: pages.pageCount,
      fromPage,
      regions,
      batchBytes: BATCH_BYTES,
      maxRows: 1024,
      maxSegmentBytes: BATCH_BYTES,
      joinGapPages: 0,
    });
    fromPage = nextPage;
    for (let from = 0; from < bytes;) {
      const read = readProcess({
        pid,
        rows,
        dest,
        from,
        cancel,
        cancelIndex: 0,
        enomemDeadlineMs: 1_000,
      });
      if (read.error !== 0) return err(readError(pid, read.error, read.address));
      from = read.bytesDone;
    }
    markZero(zero, rows, zeroPages(dest.subarray(0, bytes)));
    await new Promise((resolve) => setImmediate(resolve));
    signal.throwIfAborted();
  }
  return ok(zero);
}

function markZero(into: PageBitmap, rows: BigUint64Array, found: Uint8Array): void {
  let at = 0;
  for (let row = 0; row < rows.length; row += 3) {
    const first = Number(rows[row + 1] ?? 0n) / PAGE_BYTES;
    const count = Number(rows[row + 2] ?? 0n) / PAGE_BYTES;
    for (let page = 0; page < count; page += 1, at += 1) {
      if ((((found[Math.floor(at / 8)] ?? 0) >> (at % 8)) & 1) === 1) {
        setPages(into.bits, first + page, 1);
      }
    }
  }
}

function readError(pid: number, error: number, address: bigint): VmmError {
  const code = errnoName(error);
  if (code === 'ESRCH') return vmmError('vm-exited', `the VM exited (pid ${pid})`, { code });
  const message = `cannot read the memory of pid ${pid} at 0x${address.toString(16)} (${code})`;
  const kind = code === 'EPERM' || code === 'EACCES' ? 'permission-denied' : 'tracking-unsupported';
  return vmmError(kind, message, { code });
}
