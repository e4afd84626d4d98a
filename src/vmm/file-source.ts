/**
 * The source of dialect `firecracker` (upstream): `snapshot/create` writes the VM state together
 * with a memory file, whose data extents are the set and whose bytes are the bytes. With dirty
 * tracking they are the pages written since the last snapshot, and writing them forgets them;
 * without, the pages that mincore calls resident. Where the guest's memory can be found in the
 * VMM's address space, the page tables are asked as well, about removed pages; modes `mincore` and
 * `pagemap` then ask nothing else, and the VMM saves its state alone where it does that. Where it
 * cannot be found and pages may have been removed, or come from a fault handler, no diff names them
 * all: then the VMM writes a full memory file, of which what the parent has already is dropped,
 * except in the capture that finds this out.
 */
import { lstat, rm } from 'node:fs/promises';
import { dirname } from 'node:path';
import type { MemoryLayout, PageBitmap } from '../memory.ts';
import { errnoName, fileExtentsInTurns } from '../native/guest.ts';
import { assert, err, ok, systemCode, type Result } from '../result.ts';
import { MIB, pagesExact } from '../units.ts';
import { fullBitmap, isEmptyBitmap, without } from './bitmap.ts';
import { readFaultedRanges } from './address-map.ts';
import type { VmmClient } from './client.ts';
import { caught, orFail, vmmError, type VmmError } from './errors.ts';
import { requireFineExtents } from './extents.ts';
import { GuestView, ownPages, residentPages, withZeroContent } from './guest-view.ts';
import { identityError, type ProcessIdentity } from './identity.ts';
import { requirePaused, type SourceDeps } from './process-source.ts';
import { findByContent, mayHold } from './region-proof.ts';
import { fileLayout, oneRegion } from './region-search.ts';
import { completeSelection, startedFromImage, type PageView, type Selection } from './select.ts';
import type { DirtySource, FetchedSet, FetchRequest, ParentPages, TrackingMode } from './source.ts';
import { StateAlone } from './state-alone.ts';
import { requireNoSwap, trackingNow } from './still-safe.ts';
import { openVmmFile } from './vmm-file.ts';

export class FileSource implements DirtySource {
  readonly kind: TrackingMode;
  readonly dialect = 'firecracker';
  readonly clearsOnRead: boolean;
  readonly epochs = null;
  readonly round = null;
  readonly #client: VmmClient;
  readonly #identity: ProcessIdentity;
  readonly #view: GuestView;
  #tracked: boolean;
  readonly #removesPages: boolean;
  readonly #readSwaps: SourceDeps['readSwaps'];
  readonly #stateAlone: StateAlone;
  /** Writes Diff files without dirty tracking, of what is resident. */
  readonly #diffsUntracked: boolean;
  /** Nothing in the address space has what the memory file has. */
  #misled = false;
  /** A diff would not name every page that changed. */
  #blind = false;

  constructor(deps: SourceDeps, kind: TrackingMode) {
    this.kind = kind;
    this.#client = deps.client;
    this.#identity = deps.identity;
    this.#view = new GuestView(deps.identity, deps.recalled);
    this.#tracked = deps.facts.machineConfig.track_dirty_pages;
    this.#removesPages = deps.facts.capabilities.removesPages;
    this.#readSwaps = deps.readSwaps;
    this.#stateAlone = new StateAlone(deps.client, deps.identity.uid);
    this.#diffsUntracked = !isBefore113(deps.facts.version);
    this.clearsOnRead = kind === 'dirty';
  }

  get cumulative(): boolean {
    return this.kind !== 'dirty' || this.#blind;
  }

  /** The VMM's own mincore does not see swapped pages; the page tables do. */
  get seesSwapped(): boolean {
    return this.kind !== 'mincore' || this.#tracked;
  }

  get known(): MemoryLayout | null {
    return this.#view.known;
  }

  layout(signal: AbortSignal): Promise<Result<MemoryLayout, VmmError>> {
    return caught(async () => {
      this.#tracked = orFail(await trackingNow(this.#client, this.kind, signal));
      orFail(await requireNoSwap(this, this.#readSwaps));
      const { layout, found } = await this.#findLayout(signal);
      if (found === 'no' && this.#needsPageTables()) orFail(err(this.#notFound()));
      if (found === 'yes') orFail(await this.#view.backing(layout));
      this.#blind = found === 'no' && this.#removesPages;
      return ok(layout);
    });
  }

  fetch(request: FetchRequest): Promise<Result<FetchedSet, VmmError>> {
    return caught(async () => {
      const { signal, statePath, memFilePath, stateSaved } = request;
      assert(memFilePath !== undefined, 'dialect firecracker needs a path for the memory file');
      this.#requireSame();
      await requirePaused(this.#client, signal);
      const placed = await this.#findLayout(signal);
      await requireAbsent(memFilePath);
      await requireFineExtents(dirname(memFilePath));
      const { found } = placed;
      const files = { snapshotPath: statePath, memFilePath, stateSaved };
      if (
        found === 'yes' &&
        this.kind !== 'dirty' &&
        (await this.#stateAlone.save(files, signal))
      ) {
        await stateSaved(signal);
        return ok(await this.#fromOutside(placed.layout, request));
      }
      const widen = request.widen === true && this.kind === 'dirty';
      const mustBeFull = !this.#tracked && !this.#diffsUntracked;
      const whole =
        widen || mustBeFull || (found === 'no' && (await this.#wouldMiss(request.parent)));
      const first = whole ? 'Full' : 'Diff';
      let extents = await this.#snapshot(first, files, placed.layout, signal);
      let proven = await this.#prove(placed, first, memFilePath, extents, signal);
      if (proven === null && !whole && (await this.#needsAll(placed, request.parent))) {
        this.#blind = true;
        for (const path of [statePath, memFilePath]) await rm(path, { force: true });
        extents = await this.#snapshot('Full', files, placed.layout, signal);
        proven = await this.#prove(placed, 'Full', memFilePath, extents, signal);
      }
      if (proven === null && this.#needsPageTables()) orFail(err(this.#notFound()));
      const layout = proven ?? placed.layout;
      const view = proven === null ? null : await this.#look(layout, extents, request);
      const set = await this.#choose(extents, view, layout, request.parent, memFilePath);
      this.#requireSame();
      return ok(this.#asked(set, statePath));
    });
  }

  /** All that is there, or is the VM's own, by the page tables: the VMM writes no memory file. */
  async #fromOutside(layout: MemoryLayout, request: FetchRequest): Promise<FetchedSet> {
    const view = orFail(await this.#view.look(layout, request.signal));
    const { selected, zero } = this.#selectThere(view, request.parent);
    this.#requireSame();
    return this.#asked({ layout, selected, zero, bytes: { kind: 'process' } }, request.statePath);
  }

  #asked(set: Omit<FetchedSet, 'vmStatePath' | 'confirm'>, vmStatePath: string): FetchedSet {
    return { ...set, vmStatePath, confirm: (signal) => this.#confirm(signal) };
  }

  /** Still paused; all else was asked before the memory file was made. */
  #confirm(signal: AbortSignal): Promise<Result<void, VmmError>> {
    return caught(async () => {
      await requirePaused(this.#client, signal);
      return ok(undefined);
    });
  }

  /** The memory is not yet proved to be where it may be, and a diff is not enough. */
  async #needsAll(placed: Placed, parent: FetchRequest['parent']): Promise<boolean> {
    const provable = placed.found === 'maybe' && !this.#misled;
    return (provable && this.#needsPageTables()) || (await this.#wouldMiss(parent));
  }

  /** Without the page tables: whether pages may have changed that no diff names. */
  async #wouldMiss(parent: FetchRequest['parent']): Promise<boolean> {
    if (parent !== 'none') return this.#removesPages;
    return orFail(await readFaultedRanges(this.#identity.pid)).length > 0;
  }

  /** Makes the VMM's two files; returns the pages that the memory file names. */
  async #snapshot(
    type: 'Full' | 'Diff',
    files: SnapshotFiles & Pick<FetchRequest, 'stateSaved'>,
    layout: MemoryLayout,
    signal: AbortSignal,
  ): Promise<PageBitmap> {
    const { stateSaved, ...paths } = files;
    orFail(await this.#client.createSnapshot({ type, ...paths }, signal));
    await stateSaved(signal);
    return readExtents(files.memFilePath, layout, {
      socketPath: this.#client.socketPath,
      uid: this.#identity.uid,
      everything: type === 'Full',
      signal,
    });
  }

  /** The page tables, where they can tell more than the memory file. */
  async #look(
    layout: MemoryLayout,
    extents: PageBitmap,
    request: FetchRequest,
  ): Promise<PageView | null> {
    const { parent, signal } = request;
    if (this.#needsPageTables()) return orFail(await this.#view.look(layout, signal));
    if (parent === 'none') {
      const whole = startedFromImage(orFail(await this.#view.backing(layout)));
      return whole ? orFail(await this.#view.look(layout, signal)) : null;
    }
    if (!this.#removesPages) return null;
    const view = orFail(await this.#view.look(layout, signal));
    const { pid } = this.#identity;
    return orFail(await withZeroContent(view, pid, extents, parent, signal));
  }

  /** Where the memory is, once what the memory file has was found there; null: not found. */
  async #prove(
    placed: Placed,
    type: 'Full' | 'Diff',
    path: string,
    pages: PageBitmap,
    signal: AbortSignal,
  ): Promise<MemoryLayout | null> {
    if (placed.found === 'yes') return placed.layout;
    if (placed.found === 'no' || this.#misled) return null;
    const vmas = orFail(await this.#view.vmas());
    const { imageBytes } = placed.layout;
    const samplesMax = samplesOf[type];
    const { pid } = this.#identity;
    const found = await findByContent({ pid, vmas, imageBytes, path, pages, samplesMax, signal });
    if (found === 'nowhere') this.#misled = true;
    return typeof found === 'string' ? null : orFail(this.#view.adopt(found));
  }

  async #choose(
    extents: PageBitmap,
    view: PageView | null,
    layout: MemoryLayout,
    parent: ParentPages | 'none' | 'unknown',
    memFilePath: string,
  ): Promise<Omit<FetchedSet, 'vmStatePath' | 'confirm'>> {
    const fromFile = { kind: 'file', path: memFilePath } as const;
    if (view === null) return { layout, selected: extents, zero: null, bytes: fromFile };
    const { selected, zero } = this.#select(extents, view, parent);
    // The file has what the VMM put there; anything beyond that is read from the process.
    if (isEmptyBitmap(without(selected, extents))) {
      return { layout, selected, zero, bytes: fromFile };
    }
    await rm(memFilePath, { force: true });
    return { layout, selected, zero, bytes: { kind: 'process' } };
  }

  #select(
    extents: PageBitmap,
    view: PageView,
    parent: ParentPages | 'none' | 'unknown',
  ): Selection {
    if (this.#needsPageTables()) return this.#selectThere(view, parent);
    return completeSelection(extents, view, parent);
  }

  #selectThere(view: PageView, parent: ParentPages | 'none' | 'unknown'): Selection {
    const { socketPath } = this.#client;
    const there =
      this.kind === 'pagemap'
        ? orFail(ownPages(view, socketPath)).own
        : orFail(residentPages(view, socketPath)).resident;
    return completeSelection(there, view, parent);
  }

  /** Modes that the memory file cannot serve. */
  #needsPageTables(): boolean {
    return this.kind === 'pagemap' || (this.kind === 'mincore' && this.#tracked);
  }

  /** Upstream does not say where its memory is; files need no addresses, so not knowing is fine. */
  async #findLayout(signal: AbortSignal): Promise<Placed> {
    const imageBytes = orFail(await this.#client.machineConfig(signal)).mem_size_mib * MIB;
    const { known } = this.#view;
    if (known === null) return this.#lookFor(imageBytes);
    if (known.imageBytes === imageBytes) return { layout: known, found: 'yes' };
    const { socketPath } = this.#client;
    const message =
      `the memory layout of the VM at ${socketPath} changed: it has ${imageBytes} bytes of ` +
      `memory now, ${known.imageBytes} before`;
    return orFail(err(vmmError('layout-changed', message, { socketPath })));
  }

  async #lookFor(imageBytes: number): Promise<Placed> {
    const nowhere = { layout: oneRegion(0n, imageBytes), found: 'no' } as const;
    const vmas = await this.#view.vmas();
    // Without permission the file alone must do; modes that need more say so.
    if (!vmas.ok) {
      const bearable = vmas.error.kind === 'permission-denied' && !this.#needsPageTables();
      return bearable ? nowhere : orFail(vmas);
    }
    const ofFile = fileLayout(vmas.value, imageBytes);
    if (ofFile !== null) return { layout: orFail(this.#view.adopt(ofFile)), found: 'yes' };
    const isLikely = !this.#misled && mayHold(vmas.value, imageBytes);
    return isLikely ? { ...nowhere, found: 'maybe' } : nowhere;
  }

  #notFound(): VmmError {
    const { socketPath } = this.#client;
    const message =
      `the memory of the VM at ${socketPath} was not found in its address space, which tracking ` +
      `mode ${this.kind} needs ${this.#tracked ? 'when dirty tracking is on ' : ''}here. It is ` +
      'found by what the guest has written: capture again once it has, or attach it in mode dirty';
    return vmmError('layout-unknown', message, { socketPath });
  }

  #requireSame(): void {
    const check = this.#identity.check();
    if (check !== 'same') orFail(err(identityError(this.#identity, check)));
  }
}

/** Pages of a memory file that are looked at to find the memory; most of a full one may be zero. */
const samplesOf = { Diff: 64, Full: 2048 } as const;

interface SnapshotFiles {
  readonly snapshotPath: string;
  readonly memFilePath: string;
}

/** Those refuse a Diff without dirty tracking. */
function isBefore113(version: string): boolean {
  const [, major, minor] = /^v?(\d+)\.(\d+)\./.exec(version) ?? [];
  return major === '0' || (major === '1' && Number(minor) < 13);
}

interface Placed {
  readonly layout: MemoryLayout;
  /**
   * `maybe`: its content may tell; `no`: it cannot. With both, the layout is one region at address
   * 0, for reading from the file only.
   */
  readonly found: 'yes' | 'maybe' | 'no';
}

/** A Diff is merged into a file that is already there, whose old extents would count as dirty. */
async function requireAbsent(path: string): Promise<void> {
  try {
    await lstat(path);
  } catch (error) {
    if (systemCode(error) === 'ENOENT') return;
    const code = systemCode(error) ?? '';
    orFail(err(vmmError('memory-file-bad', `cannot look at ${path} (${code})`, { code })));
  }
  orFail(err(vmmError('memory-file-bad', `${path} exists: a memory file must be new`)));
}

async function readExtents(
  path: string,
  layout: MemoryLayout,
  o: {
    readonly socketPath: string;
    /** Of the VMM's process. */
    readonly uid: number;
    readonly everything: boolean;
    readonly signal: AbortSignal;
  },
): Promise<PageBitmap> {
  const { socketPath, everything, signal } = o;
  const pages = pagesExact(layout.imageBytes);
  const bad = (problem: string): never =>
    orFail(err(vmmError('memory-file-bad', `the VMM's memory file ${path} ${problem}`)));
  const limits = { uid: o.uid, bytesMax: Number.MAX_SAFE_INTEGER };
  const { file, sizeBytes } = await openVmmFile(path, limits);
  try {
    if (sizeBytes !== layout.imageBytes) {
      const message =
        `the memory layout of the VM at ${socketPath} changed: its memory file has ${sizeBytes} ` +
        `bytes, and ${layout.imageBytes} were expected`;
      orFail(err(vmmError('layout-changed', message, { socketPath })));
    }
    // A full snapshot names every page, whether or not its zeroes were written.
    if (everything) return fullBitmap(pages);
    const extents = await fileExtentsInTurns(file.fd, pages, signal);
    if (extents.error !== 0) bad(`cannot be read (${errnoName(extents.error)})`);
    return { pageCount: pages, bits: extents.bits };
  } finally {
    await file.close();
  }
}
