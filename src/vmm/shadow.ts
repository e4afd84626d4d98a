/** The shadow check: two sources asked about one pause, and where they disagree. DESIGN §5. */
import { bitmapOr } from '../native/guest.ts';
import type { PageBitmap } from '../memory.ts';
import type { PageCount } from '../units.ts';
import { copyBitmap, countPages, intersection, without } from './bitmap.ts';
import type { FetchedSet } from './source.ts';

export interface ShadowDifference {
  readonly both: PageCount;
  /** Pages that only the first set stores. */
  readonly onlyFirst: PageCount;
  readonly onlySecond: PageCount;
}

/** Counts stored pages, read or zeroed alike. The two sets must cover one image. */
export function compareSets(
  first: Pick<FetchedSet, 'selected' | 'zero'>,
  second: Pick<FetchedSet, 'selected' | 'zero'>,
): ShadowDifference {
  const a = stored(first);
  const b = stored(second);
  if (a.pageCount !== b.pageCount) {
    throw new RangeError(`the sets cover ${a.pageCount} and ${b.pageCount} pages`);
  }
  return {
    both: countPages(intersection(a, b)),
    onlyFirst: countPages(without(a, b)),
    onlySecond: countPages(without(b, a)),
  };
}

function stored(set: Pick<FetchedSet, 'selected' | 'zero'>): PageBitmap {
  if (set.zero === null) return set.selected;
  const all = copyBitmap(set.selected);
  bitmapOr(all.bits, set.zero.bits);
  return all;
}
