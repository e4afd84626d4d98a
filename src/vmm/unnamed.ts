/**
 * The pages of a paused VM that a dirty set does not name, and that must therefore read as the memory
 * parent does. Left out is only what cannot differ: a page that is not there in anonymous memory of
 * the VMM's own reads zero, and so does the parent where it stores no data.
 */
import type { MemoryLayout, PageBitmap } from '../memory.ts';
import { bitmapAndNot } from '../native/guest.ts';
import { ok, type Result } from '../result.ts';
import { pagesExact } from '../units.ts';
import { fullBitmap } from './bitmap.ts';
import type { VmmError } from './errors.ts';
import { GuestView } from './guest-view.ts';
import type { ProcessIdentity } from './identity.ts';
import { pagesBacked, scanPages } from './residency.ts';
import type { ParentPages } from './source.ts';

export interface NamedPages {
  readonly selected: PageBitmap;
  readonly zero: PageBitmap | null;
}

/** Whether it is known where in the process each region is: else nothing can be read from there. */
export const isPlaced = (layout: MemoryLayout): boolean =>
  layout.regions.every((region) => region.hostAddress !== 0n);

/** @param parent what the memory parent stores; `layout` must be placed */
export async function unnamedPages(
  identity: ProcessIdentity,
  layout: MemoryLayout,
  named: NamedPages,
  parent: ParentPages,
  signal: AbortSignal,
): Promise<Result<PageBitmap, VmmError>> {
  const spans = await new GuestView(identity, layout).backing(layout);
  if (!spans.ok) return spans;
  const resident = await scanPages(identity.pid, layout, 'resident', signal);
  if (!resident.ok) return resident;
  const certain = pagesBacked(layout, spans.value, ['anonymous']);
  bitmapAndNot(certain.bits, resident.value.bits);
  bitmapAndNot(certain.bits, parent.data.bits);
  const rest = fullBitmap(pagesExact(layout.imageBytes));
  bitmapAndNot(rest.bits, certain.bits);
  bitmapAndNot(rest.bits, named.selected.bits);
  if (named.zero !== null) bitmapAndNot(rest.bits, named.zero.bits);
  return ok(rest);
}
