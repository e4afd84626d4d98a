/**
 * Dirty-set sources: one object per attached VM that says which pages a capture must store,
 * whatever the VMM's dialect and the tracking mode. DESIGN §4 and §5.
 *
 * D1 A page whose bytes may differ from the memory parent is in `selected` or in `zero`.
 * D2 `selected` and `zero` share no page.
 * D3 A page that is not there is in `zero` only where it provably reads zero; else it is left to
 *   the parent, or selected.
 * Tests: test/vmm/source.test.ts, test/vmm/removed.test.ts.
 */
import type { MemoryLayout, PageBitmap } from '../memory.ts';
import type { Result } from '../result.ts';
import type { VmmEpochs } from './epochs.ts';
import type { VmmError } from './errors.ts';
import type { Dialect } from './probe.ts';
import type { ShadowReport } from './shadow.ts';

export const trackingModes = ['mincore', 'dirty', 'pagemap'] as const;
export type TrackingMode = (typeof trackingModes)[number];

/** What the caller knows of the memory parent, from its layers' indexes. */
export interface ParentPages {
  /** Pages that some layer above the launch parent stores, as data or as zeroes. */
  readonly aboveLaunch: PageBitmap;
  /** Pages that the whole chain stores as data; every other page reads zero already. */
  readonly data: PageBitmap;
  /**
   * There is no memory parent: these pages are what this capture has copied so far. As with `none`,
   * all of what the VM was started from is selected.
   */
  readonly base?: true;
}

export interface FetchRequest {
  /** Where the VMM writes its own state; must not exist. */
  readonly statePath: string;
  /** Where dialect `firecracker` writes the memory file; must not exist. Others ignore it. */
  readonly memFilePath?: string;
  /**
   * The memory parent's pages. `none`: there is no memory parent, so nothing needs to be zeroed.
   * `unknown`: the worst is assumed, which is correct but selects more.
   */
  readonly parent: ParentPages | 'none' | 'unknown';
  /**
   * The epoch's dirty set was lost: select everything that may differ, whatever the bitmaps say.
   */
  readonly widen?: boolean;
  /** Awaited as soon as the VMM has saved the VM's state, before it is asked anything else. */
  readonly stateSaved: (signal: AbortSignal) => Promise<void>;
  readonly signal: AbortSignal;
}

/** What one capture stores. Bitmaps cover the image of `layout`. */
export interface FetchedSet {
  readonly layout: MemoryLayout;
  /** Pages whose bytes must be read. */
  readonly selected: PageBitmap;
  /** Pages that read zero and need no reading; null where the source knows of none. */
  readonly zero: PageBitmap | null;
  readonly bytes:
    | { readonly kind: 'process' }
    /** The image at its own offsets; the caller removes the file. */
    | { readonly kind: 'file'; readonly path: string };
  /** The VM state file, or null where none was written. */
  readonly vmStatePath: string | null;
  /**
   * What is still to be asked, while pages are read already: fails where the set or the layout turns
   * out not to hold, or the VM not to be paused (`vm-ran`). Call it while the VM is paused; no layer is
   * sealed before.
   */
  readonly confirm: (signal: AbortSignal) => Promise<Result<void, VmmError>>;
  /** What a shadow check found; absent where none was asked for. */
  readonly shadow?: ShadowReport;
}

/** What was written and removed since the set before, told by a VMM whose VM may be running. */
export interface RoundSet {
  readonly layout: MemoryLayout;
  readonly written: PageBitmap;
  /** Removed and not written since: these read zero. May share pages with `written`. */
  readonly removed: PageBitmap;
}

export interface DirtySource {
  readonly kind: TrackingMode;
  readonly dialect: Dialect;
  /** After a `fetch` that failed, what was dirty may be forgotten: widen the next one. */
  readonly clearsOnRead: boolean;
  /**
   * A set names every page written since the VM started (or all that are there), not only those of
   * the epoch: comparing with the parent keeps the layers thin.
   */
  readonly cumulative: boolean;
  /** Swapped pages are seen: mode `mincore` is safe with swap on. */
  readonly seesSwapped: boolean;
  /**
   * The VMM's own epochs, where it has them and the mode uses them: call `commit` once the layer of
   * a fetch is committed, `abort` when it is given up. Optional: without, sets are cumulative.
   */
  readonly epochs: VmmEpochs | null;
  /**
   * Begins an epoch of the VMM while the VM runs, and reads its set: what a page read from now on
   * does not show is in the next set. The caller ends the epoch: `commit` once the set is durable.
   * Null where it is not known where the memory is; no epoch is open then. The method itself is null
   * where only a paused VM can be asked, or asking tells every page since launch.
   */
  readonly round: ((signal: AbortSignal) => Promise<Result<RoundSet | null, VmmError>>) | null;
  /** Where the memory was found to be; null until then. Holds for as long as the process lives. */
  readonly known: MemoryLayout | null;
  /**
   * Where the guest's memory is. Ask before the pause: it finds out what a `fetch` would otherwise
   * have to while the VM is frozen, and refuses a layout, tracking or swap that changed.
   */
  layout(signal: AbortSignal): Promise<Result<MemoryLayout, VmmError>>;
  /** The VM must be paused. Rejects with the signal's reason when aborted. */
  fetch(request: FetchRequest): Promise<Result<FetchedSet, VmmError>>;
}
