/**
 * Turns the selected pages into batches of address ranges, in ascending image order: neighbours
 * merged, split at memory regions, at the longest LSMT segment and at the batch size. In: selected
 * sets, one but for rounds of pre-copy. Out: batches of at most `batchBytes` and `batchRanges` rows. Scans as it goes:
 * memory does not grow with the guest.
 */
import { coalesceBatch } from '../native/guest.ts';
import type { PageBitmap } from '../memory.ts';
import { SEGMENT_BYTES_MAX } from '../layer/format.ts';
import type { Stage } from '../pipeline/stage.ts';
import { isEmptyBitmap } from '../vmm/bitmap.ts';
import { layoutRows } from '../vmm/layout.ts';
import type { RangeBatch, SelectedSet } from './items.ts';

export interface CoalesceConfig {
  readonly batchBytes: number;
  /**
   * Rows a batch at most; one row is one iovec of a read, and the kernel takes 1024 of them a call.
   */
  readonly batchRanges: number;
  readonly joinGapPages: number;
}

export function coalesceRanges(config: CoalesceConfig): Stage<SelectedSet, RangeBatch> {
  return {
    name: 'coalesce',
    async *run(input, { meter, signal }) {
      for await (const set of input) {
        const regions = layoutRows(set.layout);
        const limits = { regions, signal };
        const joinGapPages = mayJoin(set) ? config.joinGapPages : 0;
        const { round, unnamed = false } = set;
        for (const batch of scan(set.selected, { ...config, ...limits, joinGapPages })) {
          const { rows, bytes } = batch;
          yield await meter.item(bytes, () =>
            Promise.resolve({
              kind: 'ranges' as const,
              rows,
              bytes,
              source: set.source,
              round,
              unnamed,
            }),
          );
        }
        if (set.zero === null) continue;
        for (const batch of scan(set.zero, { ...config, ...limits, joinGapPages: 0 })) {
          const { rows, bytes } = batch;
          yield await meter.item(bytes, () =>
            Promise.resolve({ kind: 'zeros' as const, rows, bytes, round }),
          );
        }
      }
      meter.start();
      meter.end();
    },
  };
}

/**
 * A page that is read along must be there to be read: the VMM's memory file has holes between the
 * pages that it names. Where some pages are known to read zero, one of them may lie in a gap, and
 * would be stored twice; and while the VM runs, no set says what was read along. Of unnamed pages
 * each one counts.
 */
function mayJoin({ frozen, source, zero, unnamed = false }: SelectedSet): boolean {
  return frozen && !unnamed && source.kind === 'process' && (zero === null || isEmptyBitmap(zero));
}

interface ScanOptions extends CoalesceConfig {
  readonly regions: BigUint64Array;
  readonly signal: AbortSignal;
}

function* scan(
  pages: PageBitmap,
  options: ScanOptions,
): Iterable<{ readonly rows: BigUint64Array; readonly bytes: number }> {
  let fromPage = 0;
  while (fromPage < pages.pageCount) {
    options.signal.throwIfAborted();
    const batch = coalesceBatch({
      bits: pages.bits,
      pageCount: pages.pageCount,
      fromPage,
      regions: options.regions,
      batchBytes: options.batchBytes,
      maxRows: options.batchRanges,
      maxSegmentBytes: SEGMENT_BYTES_MAX,
      joinGapPages: options.joinGapPages,
    });
    fromPage = batch.nextPage;
    if (batch.rows.length > 0) yield { rows: batch.rows, bytes: batch.bytes };
  }
}
