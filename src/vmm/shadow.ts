/**
 * The shadow check (`memory_snapshot.tracking_shadow = "pagemap"`): beside what the VMM says was
 * written, the page tables of a file-backed restore are asked, where every page that was written
 * since the load is the process's own. A page that only they name is one that the VMM forgot: it
 * joins the set, so that it is captured all the same, and is counted.
 *
 * | source                                | compared                                              |
 * |---------------------------------------|-------------------------------------------------------|
 * | mode `dirty`, names all since launch  | every page of the mapped file                         |
 * | mode `dirty`, with epochs of the VMM  | of those, the pages that no layer stores yet          |
 * | mode `mincore`, `pagemap`             | nothing: they are made of the same page tables        |
 * | dialect `firecracker`                 | nothing: only the VMM's own pages are in its file     |
 * | a VM that was not restored from a file | nothing: no page there is known to be unwritten       |
 *
 * A page that only the VMM names is usual: it was removed since, or its bytes were never faulted in.
 */
import type { MemoryLayout, PageBitmap } from '../memory.ts';
import { bitmapAnd } from '../native/guest.ts';
import { ok, type Result } from '../result.ts';
import type { PageCount } from '../units.ts';
import { countPages, intersection, isEmptyBitmap, union, without } from './bitmap.ts';
import { caught, orFail, type VmmError } from './errors.ts';
import type { VmmEpochs } from './epochs.ts';
import { GuestView } from './guest-view.ts';
import type { ProcessIdentity } from './identity.ts';
import type { Dialect } from './probe.ts';
import { fileLayout } from './region-search.ts';
import { pagesBacked, scanPages } from './residency.ts';
import type { DirtySource, FetchedSet, FetchRequest, TrackingMode } from './source.ts';

/** What a comparison found, in pages; or why there was none. */
export type ShadowReport =
  | {
      readonly compared: 'all' | 'not-stored-yet';
      readonly both: PageCount;
      readonly primaryOnly: PageCount;
      /** Missed by the VMM; they are in the set all the same. */
      readonly shadowOnly: PageCount;
    }
  | { readonly compared: 'nothing'; readonly reason: string };

export class ShadowedSource implements DirtySource {
  /** Pages that only the shadow names are found while the VM is paused: nothing is copied ahead. */
  readonly round = null;
  readonly #primary: DirtySource;
  readonly #view: GuestView;

  constructor(primary: DirtySource, identity: ProcessIdentity) {
    this.#primary = primary;
    this.#view = new GuestView(identity, null);
  }

  get kind(): TrackingMode {
    return this.#primary.kind;
  }
  get dialect(): Dialect {
    return this.#primary.dialect;
  }
  get clearsOnRead(): boolean {
    return this.#primary.clearsOnRead;
  }
  get cumulative(): boolean {
    return this.#primary.cumulative;
  }
  get seesSwapped(): boolean {
    return this.#primary.seesSwapped;
  }
  get epochs(): VmmEpochs | null {
    return this.#primary.epochs;
  }
  get known(): MemoryLayout | null {
    return this.#primary.known;
  }

  layout(signal: AbortSignal): Promise<Result<MemoryLayout, VmmError>> {
    return this.#primary.layout(signal);
  }

  async fetch(request: FetchRequest): Promise<Result<FetchedSet, VmmError>> {
    const fetched = await this.#primary.fetch(request);
    if (!fetched.ok) return fetched;
    const reason = this.#whyNot(request);
    if (reason !== null) return ok({ ...fetched.value, shadow: { compared: 'nothing', reason } });
    return caught(() => this.#compare(fetched.value, request));
  }

  #whyNot({ widen, parent }: FetchRequest): string | null {
    if (this.kind !== 'dirty') return `mode ${this.kind} is made of page tables itself`;
    if (this.dialect === 'firecracker') return 'the bytes come in a file of the VMM';
    if (widen === true) return 'the capture widened to everything there';
    if (!this.cumulative && parent === 'unknown') return 'what the memory parent stores is unknown';
    return null;
  }

  async #compare(
    fetched: FetchedSet,
    request: FetchRequest,
  ): Promise<Result<FetchedSet, VmmError>> {
    const layout = await this.#placed(fetched.layout);
    const mapped = layout === null ? null : await this.#mappedFrom(layout);
    if (layout === null || mapped === null) {
      const reason = 'the VM was not restored from a memory file';
      return ok({ ...fetched, shadow: { compared: 'nothing', reason } });
    }
    const { pid } = this.#view;
    const shadow = orFail(await scanPages(pid, layout, 'private', request.signal));
    bitmapAnd(shadow.bits, mapped.bits);
    return ok(
      this.#join({ ...fetched, layout }, intersection(fetched.selected, mapped), shadow, request),
    );
  }

  /** Where nothing is dirty a source may not know where the memory is. */
  async #placed(layout: MemoryLayout): Promise<MemoryLayout | null> {
    if (layout.regions.every((region) => region.hostAddress !== 0n)) return layout;
    return fileLayout(orFail(await this.#view.vmas()), layout.imageBytes);
  }

  /** Pages that are private to the process once written; null where there are none. */
  async #mappedFrom(layout: MemoryLayout): Promise<PageBitmap | null> {
    const mapped = pagesBacked(layout, orFail(await this.#view.backing(layout)), ['file']);
    return isEmptyBitmap(mapped) ? null : mapped;
  }

  #join(
    fetched: FetchedSet,
    primary: PageBitmap,
    shadow: PageBitmap,
    { parent }: FetchRequest,
  ): FetchedSet {
    let missed = without(shadow, fetched.selected);
    if (fetched.zero !== null) missed = without(missed, fetched.zero);
    const partly = !this.cumulative && typeof parent === 'object';
    if (partly) missed = without(missed, parent.aboveLaunch);
    const both = intersection(primary, shadow);
    return {
      ...fetched,
      selected: union(fetched.selected, missed),
      shadow: {
        compared: partly ? 'not-stored-yet' : 'all',
        both: countPages(both),
        primaryOnly: countPages(without(primary, both)),
        shadowOnly: countPages(missed),
      },
    };
  }
}
