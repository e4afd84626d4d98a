/** Finds the guest's memory in the VMM's address space, and looks at its page tables. */
import type { MemoryLayout, PageBitmap } from '../memory.ts';
import { bitmapAnd, bitmapAndNot } from '../native/guest.ts';
import { err, ok, type Result } from '../result.ts';
import {
  backingOf,
  readFaultedRanges,
  readVmas,
  type AddressRange,
  type BackedSpan,
  type Vma,
} from './address-map.ts';
import { vmmError, type VmmError } from './errors.ts';
import type { ProcessIdentity } from './identity.ts';
import { requireSameLayout } from './layout.ts';
import { pagesBacked, scanPages } from './residency.ts';
import type { PageView } from './select.ts';
import type { ParentPages } from './source.ts';
import { kernelShowsZeroPages, zeroInMemory } from './zero-content.ts';
import { isEmptyBitmap, union } from './bitmap.ts';

/** One VM's memory from outside. Remembers the layout, to notice when it changes. */
export class GuestView {
  readonly #identity: ProcessIdentity;
  #layout: MemoryLayout | null = null;
  /** Fault handlers register once, when a snapshot is loaded; reading this list is slow. */
  #faulted: readonly AddressRange[] | null = null;

  /** @param recalled where an earlier life of the daemon had found this process's memory */
  constructor(identity: ProcessIdentity, recalled: MemoryLayout | null) {
    this.#identity = identity;
    this.#layout = recalled;
  }

  get pid(): number {
    return this.#identity.pid;
  }

  /** The layout that was found before, if any. */
  get known(): MemoryLayout | null {
    return this.#layout;
  }

  /** Takes a layout that was just found; `layout-changed` where it is not the one before. */
  adopt(layout: MemoryLayout): Result<MemoryLayout, VmmError> {
    const same = requireSameLayout(this.#layout, layout, this.#identity.socketPath);
    if (same.ok) this.#layout = layout;
    return same;
  }

  vmas(): Promise<Result<readonly Vma[], VmmError>> {
    return readVmas(this.pid);
  }

  /**
   * What backs each part of the guest's memory now.
   * @param seen the address map, where it was just read
   */
  async backing(
    layout: MemoryLayout,
    seen: readonly Vma[] | null = null,
  ): Promise<Result<readonly BackedSpan[], VmmError>> {
    if (this.#faulted === null) {
      const faulted = await readFaultedRanges(this.pid);
      if (!faulted.ok) return faulted;
      this.#faulted = faulted.value;
    }
    const vmas = seen === null ? await this.vmas() : ok(seen);
    return vmas.ok ? backingOf(layout, vmas.value, this.#faulted) : vmas;
  }

  /**
   * The page tables of a paused VM.
   * @param vmas its address map, where it was read since the pause
   */
  async look(
    layout: MemoryLayout,
    signal: AbortSignal,
    vmas: readonly Vma[] | null = null,
  ): Promise<Result<PageView, VmmError>> {
    const spans = await this.backing(layout, vmas);
    if (!spans.ok) return spans;
    const resident = await scanPages(this.pid, layout, 'resident', signal);
    if (!resident.ok) return resident;
    // Only a file has pages that are there and not the VM's own.
    const fileBacked = spans.value.some((span) => span.backing === 'file');
    const own = fileBacked ? await scanPages(this.pid, layout, 'private', signal) : resident;
    if (!own.ok) return own;
    const zeroMapped = await scanPages(this.pid, layout, 'zero', signal);
    if (!zeroMapped.ok) return zeroMapped;
    return ok({
      layout,
      spans: spans.value,
      resident: resident.value,
      own: own.value,
      zeroMapped: zeroMapped.value,
    });
  }
}

/**
 * Adds to the view what removals left no trace of: pages that nobody wrote, that the parent has
 * data of, and that are zero now. Only where the kernel does not show them; reads every such page.
 * @param dirty written pages, which are read anyway
 */
export async function withZeroContent(
  view: PageView,
  pid: number,
  dirty: PageBitmap,
  parent: ParentPages | 'unknown',
  signal: AbortSignal,
): Promise<Result<PageView, VmmError>> {
  if (kernelShowsZeroPages()) return ok(view);
  const clean = pagesBacked(view.layout, view.spans, ['anonymous', 'faulted']);
  bitmapAnd(clean.bits, view.resident.bits);
  bitmapAndNot(clean.bits, dirty.bits);
  if (parent !== 'unknown') bitmapAnd(clean.bits, parent.data.bits);
  const zero = await zeroInMemory(pid, view.layout, clean, signal);
  if (!zero.ok) return zero;
  return ok({ ...view, zeroMapped: union(view.zeroMapped, zero.value) });
}

/**
 * For mode `mincore`: pages that are there. Memory shared with others cannot be told from outside.
 */
export function residentPages(view: PageView, socketPath: string): Result<PageView, VmmError> {
  const shared = pagesBacked(view.layout, view.spans, ['shared']);
  if (isEmptyBitmap(shared)) return ok(view);
  const message =
    `the memory of the VM at ${socketPath} is shared with other processes, so its page table ` +
    'does not say which pages exist: use tracking mode dirty';
  return err(vmmError('tracking-unsupported', message, { socketPath }));
}

/**
 * For mode `pagemap`: the pages that are the VM's own. Only of a VM that was restored from a file:
 * of other memory every page is.
 */
export function ownPages(view: PageView, socketPath: string): Result<PageView, VmmError> {
  if (view.spans.some((span) => span.backing === 'file')) return residentPages(view, socketPath);
  const message =
    `the memory of the VM at ${socketPath} is not a private mapping of a memory file, so ` +
    'tracking mode pagemap cannot tell what was written: use tracking mode dirty or mincore';
  return err(vmmError('tracking-unsupported', message, { socketPath }));
}
