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
 */
import type { MemoryLayout, PageBitmap } from '../memory.ts';
import { bitmapAnd, bitmapAndNot, bitmapOr } from '../native/guest.ts';
import { pagesExact } from '../units.ts';
import type { BackedSpan, Backing } from './address-map.ts';
import { copyBitmap, isEmptyBitmap } from './bitmap.ts';
import { pagesBacked } from './residency.ts';
import type { ParentPages } from './source.ts';
import { emptyBitmap } from './bitmap.ts';

/** The guest's memory from outside, all of one moment: the VM is paused. */
export interface PageView {
  readonly layout: MemoryLayout;
  readonly spans: readonly BackedSpan[];
  /** Present or swapped. */
  readonly resident: PageBitmap;
  /** Present or swapped, and not a page of the mapped file. */
  readonly own: PageBitmap;
}

export interface Selection {
  readonly selected: PageBitmap;
  readonly zero: PageBitmap | null;
}

export function completeSelection(
  dirty: PageBitmap,
  view: PageView,
  parent: ParentPages | 'none' | 'unknown',
): Selection {
  const backed = (kind: Backing): PageBitmap => pagesBacked(view.layout, view.spans, [kind]);
  const selected = copyBitmap(dirty);
  const absent = backed('anonymous');
  bitmapAndNot(absent.bits, view.resident.bits);
  bitmapAndNot(selected.bits, absent.bits);
  if (parent === 'none') return { selected, zero: null };
  addReverted(selected, backed('file'), view.own, parent);
  addReverted(selected, backed('faulted'), view.resident, parent);
  if (parent !== 'unknown') bitmapAnd(absent.bits, parent.data.bits);
  return { selected, zero: isEmptyBitmap(absent) ? null : absent };
}

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

export function noPages(layout: MemoryLayout): PageBitmap {
  return emptyBitmap(pagesExact(layout.imageBytes));
}
