/** Which pages the memory parent stores, from the indexes of its layers alone: no data is read. */
import { LayerStack } from '../layer/layer-stack.ts';
import { ROW_COLUMNS, ZEROED_ROW } from '../layer/format.ts';
import type { PageBitmap } from '../memory.ts';
import { bitmapSetRange } from '../native/guest.ts';
import { PAGE_BYTES, pageCount, pagesCeil, type Bytes } from '../units.ts';
import { emptyBitmap } from '../vmm/bitmap.ts';
import type { ParentPages } from '../vmm/source.ts';
import { orThrow } from './failure.ts';

/** Rows fetched per native call. */
const rowsMax = 8192;

/**
 * @param chain the open memory parent
 * @param paths its layer files, bottom to top
 * @param launchDepth how many of them are the launch parent
 */
export async function parentPages(
  chain: LayerStack,
  paths: readonly string[],
  launchDepth: number,
  imageBytes: Bytes,
): Promise<ParentPages> {
  const data = emptyBitmap(pageCount(pagesCeil(imageBytes)));
  mark(chain, data, false);
  const aboveLaunch = emptyBitmap(pageCount(pagesCeil(imageBytes)));
  const above = paths.slice(launchDepth);
  if (above.length > 0) {
    await using upper = orThrow(await LayerStack.open(above, { partial: true }));
    mark(upper, aboveLaunch, true);
  }
  return { aboveLaunch, data };
}

/** Sets every page that a segment touches. */
function mark(stack: LayerStack, into: PageBitmap, withZeroed: boolean): void {
  const reader = stack.nativeReader();
  let entry = 0;
  let sector = 0;
  for (;;) {
    const all = Number.MAX_SAFE_INTEGER;
    const next = reader.nextRows(entry, sector, all, rowsMax, withZeroed, false);
    if (next.rows.length === 0) return;
    for (let row = 0; row < next.rows.length; row += ROW_COLUMNS) {
      if (!withZeroed && next.rows[row + 2] === ZEROED_ROW) continue;
      const from = Number(next.rows[row] ?? 0n);
      const to = from + Number(next.rows[row + 1] ?? 0n);
      const first = Math.floor(from / PAGE_BYTES);
      const end = Math.min(Math.ceil(to / PAGE_BYTES), into.pageCount);
      if (end > first) bitmapSetRange(into.bits, first, end - first);
    }
    ({ entry, sector } = next);
  }
}
