/**
 * Sources whose bytes come from the VMM process (dialects `aenv` and `e2b`): the VMM says where its
 * memory is and, in mode `dirty`, what was written; in modes `mincore` and `pagemap` the page
 * tables are asked from outside, which sees swapped pages too.
 */
import type { MemoryLayout, PageBitmap } from '../memory.ts';
import { err, ok, type Result } from '../result.ts';
import { completeSpans, fileLayout, singleRegion, writableRuns, type Vma } from './address-map.ts';
import type { VmmClient } from './client.ts';
import { decodeDirtyRanges, type DirtyRanges } from './dirty-ranges.ts';
import type { VmmEpochs } from './epochs.ts';
import { caught, orFail, vmmError, type VmmError } from './errors.ts';
import { GuestView, ownPages, residentPages } from './guest-view.ts';
import { identityError, type ProcessIdentity } from './identity.ts';
import { buildLayout } from './layout.ts';
import { decodeMappings, decodePageBits, type Mappings } from './page-bits.ts';
import type { Dialect, VmmFacts } from './probe.ts';
import { completeSelection, everythingThere, type PageView } from './select.ts';
import type { DirtySource, FetchedSet, FetchRequest, TrackingMode } from './source.ts';

export interface SourceDeps {
  readonly client: VmmClient;
  readonly facts: VmmFacts;
  readonly identity: ProcessIdentity;
  readonly epochs: VmmEpochs | null;
}

/** What the VMM said about written pages, and where it has them. */
interface Told {
  readonly layout: MemoryLayout;
  readonly dirty: PageBitmap;
}

export class ProcessSource implements DirtySource {
  readonly kind: TrackingMode;
  readonly dialect: Dialect;
  readonly clearsOnRead = false;
  readonly seesSwapped = true;
  readonly epochs: VmmEpochs | null;
  readonly #client: VmmClient;
  readonly #facts: VmmFacts;
  readonly #identity: ProcessIdentity;
  readonly #view: GuestView;

  constructor(deps: SourceDeps, kind: TrackingMode) {
    this.kind = kind;
    this.dialect = deps.facts.dialect;
    this.epochs = kind === 'dirty' ? deps.epochs : null;
    this.#client = deps.client;
    this.#facts = deps.facts;
    this.#identity = deps.identity;
    this.#view = new GuestView(deps.identity);
  }

  layout(signal: AbortSignal): Promise<Result<MemoryLayout, VmmError>> {
    return caught(async () => {
      const layout = await this.#findLayout(signal);
      orFail(await this.#view.backing(layout));
      return ok(layout);
    });
  }

  fetch(request: FetchRequest): Promise<Result<FetchedSet, VmmError>> {
    return caught(async () => {
      const { signal, statePath } = request;
      this.#requireSame();
      await requirePaused(this.#client, signal);
      // The state first: saving it may still write guest memory, and that must be in the set.
      orFail(await this.#client.createSnapshot({ type: 'Diff', snapshotPath: statePath }, signal));
      const { view, dirty } = await this.#ask(request.widen === true, signal);
      const { selected, zero } = completeSelection(dirty, view, request.parent);
      this.#requireSame();
      return ok({
        layout: view.layout,
        selected,
        zero,
        bytes: { kind: 'process' },
        vmStatePath: statePath,
      });
    });
  }

  async #ask(widen: boolean, signal: AbortSignal): Promise<{ view: PageView; dirty: PageBitmap }> {
    if (this.kind === 'dirty' && !widen) {
      const told = await this.#told(signal);
      return { view: orFail(await this.#view.look(told.layout, signal)), dirty: told.dirty };
    }
    const layout = await this.#findLayout(signal);
    const view = orFail(await this.#view.look(layout, signal));
    if (this.kind === 'dirty') return { view, dirty: everythingThere(view) };
    const { socketPath } = this.#client;
    if (this.kind === 'pagemap' && !widen) {
      return { view, dirty: orFail(ownPages(view, socketPath)).own };
    }
    return { view, dirty: orFail(residentPages(view, socketPath)).resident };
  }

  /** The VMM's dirty set. */
  async #told(signal: AbortSignal): Promise<Told> {
    if (this.#facts.capabilities.dirtyRanges) {
      const ranges = await this.#dirtyRanges(signal);
      return { layout: await this.#layoutOfRanges(ranges, signal), dirty: ranges.dirty };
    }
    const mappings = await this.#mappings(signal);
    const text = orFail(await this.#client.bulk('/memory/dirty', signal));
    const what = `GET /memory/dirty at ${this.#client.socketPath}`;
    const dirty = decodePageBits(text, ['bitmap'], mappings, what).bitmap;
    return { layout: mappings.layout, dirty };
  }

  async #findLayout(signal: AbortSignal): Promise<MemoryLayout> {
    if (this.#facts.capabilities.memoryMappings) return (await this.#mappings(signal)).layout;
    return this.#layoutOfRanges(await this.#dirtyRanges(signal), signal);
  }

  async #mappings(signal: AbortSignal): Promise<Mappings> {
    const answer = orFail(await this.#client.memoryMappings(signal));
    const what = `GET /memory/mappings at ${this.#client.socketPath}`;
    const mappings = orFail(decodeMappings(answer, what));
    orFail(this.#view.adopt(mappings.layout));
    return mappings;
  }

  async #dirtyRanges(signal: AbortSignal): Promise<DirtyRanges> {
    const text = orFail(await this.#client.bulk('/vm/dirty-memory-ranges', signal));
    return decodeDirtyRanges(text, `GET /vm/dirty-memory-ranges at ${this.#client.socketPath}`);
  }

  /** Ranges name written pages only; the rest of each region is found in the address map. */
  async #layoutOfRanges(ranges: DirtyRanges, signal: AbortSignal): Promise<MemoryLayout> {
    const { socketPath } = this.#client;
    if (this.#facts.capabilities.memoryMappings) {
      const { layout } = await this.#mappings(signal);
      requireAgreement(ranges, layout, socketPath);
      return layout;
    }
    const known = this.#view.known;
    if (known !== null && known.imageBytes === ranges.imageBytes) {
      requireAgreement(ranges, known, socketPath);
      return known;
    }
    const vmas = orFail(await this.#view.vmas());
    const found = fileLayout(vmas, ranges.imageBytes) ?? anonymousLayout(ranges, vmas, socketPath);
    const what = `GET /vm/dirty-memory-ranges at ${socketPath}`;
    const layout = orFail(buildLayout(found.regions, what, 'ranges'));
    requireAgreement(ranges, layout, socketPath);
    return orFail(this.#view.adopt(layout));
  }

  #requireSame(): void {
    const check = this.#identity.check();
    if (check !== 'same') orFail(err(identityError(this.#identity, check)));
  }
}

/** A running VM's dirty set is out of date before it arrives. */
export async function requirePaused(client: VmmClient, signal: AbortSignal): Promise<void> {
  const state = orFail(await client.state(signal));
  if (state === 'Paused') return;
  const message = `the VM at ${client.socketPath} is not paused (${state}): nothing may be read`;
  orFail(err(vmmError('vmm-refused', message, { socketPath: client.socketPath })));
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

function anonymousLayout(
  ranges: DirtyRanges,
  vmas: readonly Vma[],
  socketPath: string,
): { readonly regions: MemoryLayout['regions'] } {
  const regions =
    ranges.spans.length === 0
      ? (singleRegion(vmas, ranges.imageBytes)?.regions ?? null)
      : completeSpans(ranges.spans, writableRuns(vmas), ranges.imageBytes);
  if (regions !== null) return { regions };
  const message =
    `where the memory regions of the VM at ${socketPath} begin and end cannot be told from its ` +
    `${ranges.spans.length} dirty runs and its address map; GET /memory/mappings would say it`;
  return orFail(err(vmmError('layout-unknown', message, { socketPath })));
}
