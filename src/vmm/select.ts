/**
 * From a dirty set and the page tables to what a capture stores. A dirty bitmap knows writes, not
 * removals: a page that a balloon or free page reporting took away was written by nobody, yet reads
 * otherwise than the memory parent.
 *
 * | backing   | a page that is not there reads | so it is                                      |
 * |-----------|--------------------------------|-----------------------------------------------|
 * | anonymous | zero                           | `zero`, where the parent has data             |
 * | file      | the launch image               | selected, where a layer above that stores it  |
 * | faulted   | what its fault handler gives   | selected, where a layer above that stores it  |
 * | shared    | unknown: others may write it   | left to the dirty set                         |
 *
 * A removed page that the guest has read since is there again, as the kernel's zero page: `zero`. A VMM with
 * epochs of its own says itself which pages were removed and not written since; the kernel is not asked
 * then, so that the sets are the same on every kernel.
 *
 * Without a memory parent there is nothing to leave a page to: then all that a file or a fault handler
 * backs is selected, written or not.
 */
import type { MemoryLayout, PageBitmap } from '../memory.ts';
import { bitmapAnd, bitmapAndNot, bitmapOr } from '../native/guest.ts';
import type { BackedSpan, Backing } from './address-map.ts';
import { copyBitmap, isEmptyBitmap } from './bitmap.ts';
import { pagesBacked } from './residency.ts';
import type { ParentPages } from './source.ts';

/** The guest's memory from outside, all of one moment: the VM is paused. */
export interface PageView {
  readonly layout: MemoryLayout;
  readonly spans: readonly BackedSpan[];
  /** Present or swapped. */
  readonly resident: PageBitmap;
  /** Present or swapped, and not a page of the mapped file. */
  readonly own: PageBitmap;
  /** The kernel's zero page is mapped there. */
  readonly zeroMapped: PageBitmap;
}

export interface Selection {
  readonly selected: PageBitmap;
  readonly zero: PageBitmap | null;
}

/**
 * @param removed pages that the VMM itself says are removed and not written since; null: unknown
 */
export function completeSelection(
  dirty: PageBitmap,
  view: PageView,
  parent: ParentPages | 'none' | 'unknown',
  removed: PageBitmap | null = null,
): Selection {
  const backed = (kind: Backing): PageBitmap => pagesBacked(view.layout, view.spans, [kind]);
  const zero = backed('anonymous');
  bitmapAndNot(zero.bits, view.resident.bits);
  bitmapOr(zero.bits, view.zeroMapped.bits);
  if (removed !== null) bitmapOr(zero.bits, removed.bits);
  const selected = copyBitmap(dirty);
  if (parent === 'none' || (parent !== 'unknown' && parent.base === true)) {
    bitmapOr(selected.bits, pagesBacked(view.layout, view.spans, ['file', 'faulted']).bits);
  } else {
    addReverted(selected, backed('file'), view.own, parent);
    addReverted(selected, backed('faulted'), view.resident, parent);
  }
  bitmapAndNot(selected.bits, zero.bits);
  if (parent === 'none') return { selected, zero: null };
  if (parent !== 'unknown') bitmapAnd(zero.bits, parent.data.bits);
  return { selected, zero: isEmptyBitmap(zero) ? null : zero };
}

/** Whether some of the guest's memory is what it was started from, and not only what it wrote. */
export const startedFromImage = (spans: readonly BackedSpan[]): boolean =>
  spans.some(({ backing }) => backing === 'file' || backing === 'faulted');

/** Pages whose own copy is gone, while the parent may still hold what it was. */
function addReverted(
  selected: PageBitmap,
  backed: PageBitmap,
  present: PageBitmap,
  parent: ParentPages | 'unknown',
): void {
  const reverted = backed;
  bitmapAndNot(reverted.bits, present.bits);
  if (parent !== 'unknown') bitmapAnd(reverted.bits, parent.aboveLaunch.bits);
  bitmapOr(selected.bits, reverted.bits);
}

/** Everything that may differ from the memory parent, when no dirty set can be trusted. */
export function everythingThere(view: PageView): PageBitmap {
  const all = copyBitmap(view.resident);
  bitmapOr(all.bits, pagesBacked(view.layout, view.spans, ['shared']).bits);
  return all;
}
