/**
 * Sources whose bytes come from the VMM process (dialects `aenv` and `e2b`): the VMM says where its
 * memory is and, in mode `dirty`, what was written; in modes `mincore` and `pagemap` the page
 * tables are asked from outside, which sees swapped pages too.
 */
import type { MemoryLayout, PageBitmap } from '../memory.ts';
import { err, ok, type Result } from '../result.ts';
import { pagesExact } from '../units.ts';
import type { Vma } from './address-map.ts';
import { emptyBitmap, isEmptyBitmap } from './bitmap.ts';
import type { VmmClient } from './client.ts';
import { decodeDirtyRanges, type DirtyRanges } from './dirty-ranges.ts';
import type { VmmEpochs } from './epochs.ts';
import { caught, orFail, vmmError, type VmmError } from './errors.ts';
import { GuestView, ownPages, residentPages, withZeroContent } from './guest-view.ts';
import { identityError, type ProcessIdentity } from './identity.ts';
import { buildLayout } from './layout.ts';
import { decodeMappings, decodePageBits, type Mappings } from './page-bits.ts';
import type { Dialect, VmmFacts } from './probe.ts';
import { completeSpans, fileLayout, oneRegion } from './region-search.ts';
import {
  completeSelection,
  everythingThere,
  startedFromImage,
  type PageView,
  type Selection,
} from './select.ts';
import type { DirtySource, FetchedSet, FetchRequest, RoundSet, TrackingMode } from './source.ts';
import { trackingNow } from './still-safe.ts';
import type { SwapArea } from './swap.ts';
import { nextTurn, together } from './together.ts';

export interface SourceDeps {
  readonly client: VmmClient;
  readonly facts: VmmFacts;
  readonly identity: ProcessIdentity;
  readonly epochs: VmmEpochs | null;
  readonly readSwaps: () => Promise<readonly SwapArea[]>;
  /** Where this process's memory was found to be before, and is still mapped. */
  readonly recalled: MemoryLayout | null;
}

type PlacedSelection = Selection & { readonly layout: MemoryLayout };

/** What the VMM said about written pages, and where it has them. */
interface Told extends Placed {
  readonly dirty: PageBitmap;
}

/** What was found out beside saving the VM's state; null: not yet known. */
interface Ahead {
  readonly mappings: Mappings | null;
  readonly vmas: readonly Vma[] | null;
}

const nothingYet: Ahead = { mappings: null, vmas: null };

interface Placed {
  readonly layout: MemoryLayout;
  /** False: where it is was not found, and no page needs it; the layout is one region at 0. */
  readonly mapped: boolean;
}

export class ProcessSource implements DirtySource {
  readonly kind: TrackingMode;
  readonly dialect: Dialect;
  readonly clearsOnRead = false;
  readonly cumulative: boolean;
  readonly seesSwapped = true;
  readonly epochs: VmmEpochs | null;
  readonly round: DirtySource['round'];
  readonly #client: VmmClient;
  readonly #facts: VmmFacts;
  #tracked: boolean;
  readonly #identity: ProcessIdentity;
  readonly #view: GuestView;
  /** As the VMM said last. */
  #mapped: Mappings | null = null;

  constructor(deps: SourceDeps, kind: TrackingMode) {
    this.kind = kind;
    this.dialect = deps.facts.dialect;
    this.epochs = kind === 'dirty' ? deps.epochs : null;
    this.cumulative = this.epochs === null;
    const { epochs } = this;
    this.round = epochs === null ? null : (signal) => this.#round(epochs, signal);
    this.#client = deps.client;
    this.#facts = deps.facts;
    this.#tracked = deps.facts.machineConfig.track_dirty_pages;
    this.#identity = deps.identity;
    this.#view = new GuestView(deps.identity, deps.recalled);
  }

  get known(): MemoryLayout | null {
    return this.#view.known;
  }

  layout(signal: AbortSignal): Promise<Result<MemoryLayout, VmmError>> {
    return caught(async () => {
      this.#tracked = orFail(await trackingNow(this.#client, this.kind, signal));
      const { layout, mapped } = await this.#findLayout(signal);
      if (mapped) orFail(await this.#view.backing(layout));
      return ok(layout);
    });
  }

  fetch(request: FetchRequest): Promise<Result<FetchedSet, VmmError>> {
    return caught(async () => {
      const { signal, statePath, stateSaved } = request;
      this.#requireSame();
      // Before the set, since saving the state may still write guest memory; the VM stands still
      // for the slowest of these. Where its memory is does not change while it is paused.
      const asked = await together(
        signal,
        (s) => this.#saveState(statePath, s).then(() => stateSaved(s)),
        (s) => this.#lookAhead(s),
      );
      if (this.epochs !== null) orFail(await this.epochs.begin(signal));
      const set = await this.#ask(request, asked[1], signal);
      this.#requireSame();
      const confirm = (s: AbortSignal): Promise<Result<void, VmmError>> => this.#confirm(s);
      return ok({ ...set, bytes: { kind: 'process' }, vmStatePath: statePath, confirm });
    });
  }

  #round(epochs: VmmEpochs, signal: AbortSignal): Promise<Result<RoundSet | null, VmmError>> {
    return caught(async () => {
      this.#requireSame();
      orFail(await epochs.begin(signal));
      const { layout, mapped, dirty } = await this.#told(
        { mappings: this.#mapped, vmas: null },
        signal,
      );
      if (!mapped) {
        orFail(await epochs.abort(signal));
        return ok(null);
      }
      const removed = this.#facts.capabilities.removesPages
        ? await this.#removed(layout, signal)
        : emptyBitmap(dirty.pageCount);
      return ok({ layout, written: dirty, removed });
    });
  }

  async #saveState(snapshotPath: string, signal: AbortSignal): Promise<void> {
    orFail(await this.#client.createSnapshot({ type: 'Diff', snapshotPath }, signal));
  }

  /** Still paused, and its memory where it was. */
  #confirm(signal: AbortSignal): Promise<Result<void, VmmError>> {
    return caught(async () => {
      await together(
        signal,
        (s) => requirePaused(this.#client, s),
        (s) => (this.#mapped === null ? Promise.resolve() : this.#mappings(s)),
      );
      this.#requireSame();
      return ok(undefined);
    });
  }

  /**
   * What a fetch may know before the VM's state is saved. Mappings that were asked for before the
   * pause are taken as they were, and asked for again in `confirm`.
   */
  async #lookAhead(signal: AbortSignal): Promise<Ahead> {
    const vmas = this.#view.vmas();
    const ask = this.#facts.capabilities.memoryMappings && this.#mapped === null;
    const mappings = ask ? await this.#mappings(signal) : this.#mapped;
    const seen = await vmas;
    // Without permission to look, the question that needs the address map says so.
    return { mappings, vmas: seen.ok ? seen.value : null };
  }

  async #ask(request: FetchRequest, ahead: Ahead, signal: AbortSignal): Promise<PlacedSelection> {
    const { parent, widen } = request;
    if (this.kind === 'dirty' && widen !== true) return this.#askVmm(parent, ahead, signal);
    const { layout, mapped } = ahead.mappings
      ? { layout: ahead.mappings.layout, mapped: true }
      : await this.#findLayout(signal);
    // Without tracking a VM names its resident pages: naming none, it has none.
    if (!mapped && this.#tracked) orFail(err(layoutUnknown(this.#client.socketPath, 0)));
    if (!mapped)
      return { layout, selected: emptyBitmap(pagesExact(layout.imageBytes)), zero: null };
    const view = orFail(await this.#view.look(layout, signal, ahead.vmas));
    return { layout, ...completeSelection(this.#there(view, widen === true), view, parent) };
  }

  /** Pages that are there, or in mode `pagemap` those of them that are the VM's own. */
  #there(view: PageView, widen: boolean): PageBitmap {
    const { socketPath } = this.#client;
    if (this.kind === 'dirty') return everythingThere(view);
    if (this.kind === 'pagemap' && !widen) return orFail(ownPages(view, socketPath)).own;
    return orFail(residentPages(view, socketPath)).resident;
  }

  async #askVmm(
    parent: FetchRequest['parent'],
    ahead: Ahead,
    signal: AbortSignal,
  ): Promise<PlacedSelection> {
    // Without a parent, what was removed needs no zeroes, and was it dirty it is read as such.
    const nothingGone = parent === 'none' || !this.#facts.capabilities.removesPages;
    const place = nothingGone ? null : (ahead.mappings?.layout ?? this.#view.known);
    const look = async (layout: MemoryLayout, s: AbortSignal): Promise<PageView> =>
      orFail(await this.#view.look(layout, s, ahead.vmas));
    // The page tables are read while the VMM makes up its answer, once the question is sent.
    const answers = await together(
      signal,
      (s) => this.#told(ahead, s),
      (s) => (place === null ? Promise.resolve(null) : nextTurn().then(() => look(place, s))),
    );
    const [{ layout, mapped, dirty }, looked] = answers;
    const noParent = parent === 'none' || (parent !== 'unknown' && parent.base === true);
    if (noParent && nothingGone && mapped && (await this.#startedFromImage(layout))) {
      return { layout, ...completeSelection(dirty, await look(layout, signal), parent) };
    }
    if (parent === 'none' || nothingGone) return { layout, selected: dirty, zero: null };
    if (!mapped) {
      // Of what the parent stores some may be gone, and where to look is not known.
      const stored = parent === 'unknown' || !isEmptyBitmap(parent.data);
      if (stored) orFail(err(layoutUnknown(this.#client.socketPath, 0)));
      return { layout, selected: dirty, zero: null };
    }
    const view = looked ?? (await look(layout, signal));
    if (this.epochs !== null) {
      const removed = await this.#removed(layout, signal);
      // The VMM says which pages are removed; whether the kernel shows it too is another matter.
      const told = { ...view, zeroMapped: emptyBitmap(dirty.pageCount) };
      return { layout, ...completeSelection(dirty, told, parent, removed) };
    }
    const { pid } = this.#identity;
    const seen = orFail(await withZeroContent(view, pid, dirty, parent, signal));
    return { layout, ...completeSelection(dirty, seen, parent) };
  }

  async #startedFromImage(layout: MemoryLayout): Promise<boolean> {
    return startedFromImage(orFail(await this.#view.backing(layout)));
  }

  /** VMMs with epochs also say what was removed and not written since. */
  async #removed(layout: MemoryLayout, signal: AbortSignal): Promise<PageBitmap> {
    const path = '/vm/removed-memory-ranges';
    const text = orFail(await this.#client.bulk(path, signal));
    const { socketPath } = this.#client;
    const removed = decodeDirtyRanges(text, `GET ${path} at ${socketPath}`);
    requireAgreement(removed, layout, socketPath);
    return removed.dirty;
  }

  /** The VMM's dirty set. */
  async #told(ahead: Ahead, signal: AbortSignal): Promise<Told> {
    if (this.#facts.capabilities.dirtyRanges) {
      const ranges = await this.#dirtyRanges(signal);
      return { ...(await this.#layoutOfRanges(ranges, ahead, signal)), dirty: ranges.dirty };
    }
    const mappings = ahead.mappings ?? (await this.#mappings(signal));
    const text = orFail(await this.#client.bulk('/memory/dirty', signal));
    const what = `GET /memory/dirty at ${this.#client.socketPath}`;
    const dirty = await this.#bitsOf(text, mappings, what, signal);
    return { layout: mappings.layout, mapped: true, dirty };
  }

  /** A bitmap that does not fit mappings of before the pause may be of a layout that changed. */
  async #bitsOf(
    text: Uint8Array,
    mappings: Mappings,
    what: string,
    signal: AbortSignal,
  ): Promise<PageBitmap> {
    try {
      return decodePageBits(text, ['bitmap'], mappings, what).bitmap;
    } catch (error) {
      await this.#mappings(signal);
      throw error;
    }
  }

  async #findLayout(signal: AbortSignal): Promise<Placed> {
    if (this.#facts.capabilities.memoryMappings) {
      return { layout: (await this.#mappings(signal)).layout, mapped: true };
    }
    return this.#layoutOfRanges(await this.#dirtyRanges(signal), nothingYet, signal);
  }

  async #mappings(signal: AbortSignal): Promise<Mappings> {
    const answer = orFail(await this.#client.memoryMappings(signal));
    const what = `GET /memory/mappings at ${this.#client.socketPath}`;
    const mappings = orFail(decodeMappings(answer, what));
    orFail(this.#view.adopt(mappings.layout));
    if (this.#mapped !== null) requireSameOrder(this.#mapped, mappings, this.#client.socketPath);
    this.#mapped = mappings;
    return mappings;
  }

  async #dirtyRanges(signal: AbortSignal): Promise<DirtyRanges> {
    const text = orFail(await this.#client.bulk('/vm/dirty-memory-ranges', signal));
    return decodeDirtyRanges(text, `GET /vm/dirty-memory-ranges at ${this.#client.socketPath}`);
  }

  /** Ranges name written pages only; the rest of each region is found in the address map. */
  async #layoutOfRanges(ranges: DirtyRanges, ahead: Ahead, signal: AbortSignal): Promise<Placed> {
    const { socketPath } = this.#client;
    if (this.#facts.capabilities.memoryMappings) {
      const { layout } = ahead.mappings ?? (await this.#mappings(signal));
      requireAgreement(ranges, layout, socketPath);
      return { layout, mapped: true };
    }
    const known = this.#view.known;
    if (known !== null) {
      requireAgreement(ranges, known, socketPath);
      return { layout: known, mapped: true };
    }
    const vmas = orFail(await this.#view.vmas());
    const found =
      fileLayout(vmas, ranges.imageBytes) ?? completeSpans(ranges.spans, vmas, ranges.imageBytes);
    if (found === null) {
      const { length } = ranges.spans;
      if (length > 0) orFail(err(layoutUnknown(socketPath, length)));
      return { layout: oneRegion(0n, ranges.imageBytes), mapped: false };
    }
    const what = `GET /vm/dirty-memory-ranges at ${socketPath}`;
    const layout = orFail(buildLayout(found.regions, what, 'ranges'));
    requireAgreement(ranges, layout, socketPath);
    return { layout: orFail(this.#view.adopt(layout)), mapped: true };
  }

  #requireSame(): void {
    const check = this.#identity.check();
    if (check !== 'same') orFail(err(identityError(this.#identity, check)));
  }
}

/** A running VM's dirty set is out of date before it arrives, and its pages newer than its state. */
export async function requirePaused(client: VmmClient, signal: AbortSignal): Promise<void> {
  const state = orFail(await client.state(signal));
  if (state === 'Paused') return;
  const { socketPath } = client;
  const message =
    `the VM at ${socketPath} is not paused any more (${state}): somebody resumed it; what it writes ` +
    'is in the next capture';
  orFail(err(vmmError('vm-ran', message, { socketPath })));
}

/** A dirty bitmap's bits are in the order of the mappings. */
function requireSameOrder(before: Mappings, now: Mappings, socketPath: string): void {
  const same =
    before.bitRegions.length === now.bitRegions.length &&
    before.bitRegions.every((region, index) => {
      const other = now.bitRegions[index];
      return other?.imageOffset === region.imageOffset && other.length === region.length;
    });
  if (same) return;
  const message = `the memory layout of the VM at ${socketPath} changed: its regions' order`;
  orFail(err(vmmError('layout-changed', message, { socketPath })));
}

/** Every range must be where the layout has it. */
function requireAgreement(ranges: DirtyRanges, layout: MemoryLayout, socketPath: string): void {
  const changed = (what: string): void => {
    const message = `the memory layout of the VM at ${socketPath} changed: ${what}`;
    orFail(err(vmmError('layout-changed', message, { socketPath })));
  };
  if (ranges.imageBytes !== layout.imageBytes) {
    changed(`it has ${ranges.imageBytes} bytes of memory now, ${layout.imageBytes} before`);
  }
  for (const span of ranges.spans) {
    const region = layout.regions.find(
      (r) => r.imageOffset <= span.imageStart && span.imageEnd <= r.imageOffset + r.length,
    );
    const at = `0x${span.imageStart.toString(16)}`;
    if (region === undefined) changed(`image offset ${at} lies across regions now`);
    else if (BigInt.asUintN(64, region.hostAddress - BigInt(region.imageOffset)) !== span.delta) {
      changed(`image offset ${at} is at another host address now`);
    }
  }
}

function layoutUnknown(socketPath: string, spans: number): VmmError {
  const message =
    `where the memory regions of the VM at ${socketPath} begin and end cannot be told from its ` +
    `${spans} dirty runs and its address map; a VMM with GET /memory/mappings would say it`;
  return vmmError('layout-unknown', message, { socketPath });
}
