/**
 * Rounds of copying while the VM still runs, so that the pause has only to copy what was written
 * again. Comes before the pause, out of the same kinds of items: each round is a set of pages that
 * goes through coalesce, read, compact and commit as the paused VM's does. Fails: as the dirty
 * source and the ledger; the VM never stopped then.
 *
 * P1 A round's set is durable in the ledger before the VMM forgets it, and nothing leaves the ledger
 *    before the layer is committed: whatever fails, the next capture has all of it.
 * P2 A page is copied only after its round's epoch began: what the copy misses is in a later set.
 * P3 A page is left out of a later set only while its newest copy is younger than every set that
 *    named it. All others are copied again, and the newer copy wins in the layer.
 * P4 A page of which the layer has an older copy is never dropped, as equal to the parent's or as a
 *    hole: the older copy would show. Such pages count as data of the parent.
 * P5 At most `rounds` rounds and `bytesMax` bytes. A round that does not fit, or is not worth it,
 *    is not copied: its pages are left to the pause.
 * Tests: test/capture/precopy.test.ts.
 */
import type { PageBitmap } from '../memory.ts';
import type { PageSets } from '../lineage/page-sets.ts';
import { PAGE_BYTES, type PageCount } from '../units.ts';
import { countPages, emptyBitmap, intersection } from '../vmm/bitmap.ts';
import { isEmptyBitmap, union, without } from '../vmm/bitmap.ts';
import type { ParentPages, RoundSet } from '../vmm/source.ts';
import type { SelectedSet } from './items.ts';

export interface PrecopyConfig {
  readonly rounds: number;
  /** Copied in all rounds together, at most. */
  readonly bytesMax: number;
  /** A set of at most this many bytes is not copied ahead: the pause is as short without. */
  readonly smallBytes: number;
}

export interface PrecopyDeps {
  /** Begins an epoch of the VMM and reads its set; null where the memory is not found. */
  readonly round: (signal: AbortSignal) => Promise<RoundSet | null>;
  /** Joins a set with the ledger, durable. */
  readonly record: (sets: PageSets) => Promise<PageSets>;
  /** The VMM may forget the round's set. */
  readonly recorded: (signal: AbortSignal) => Promise<void>;
  /** Resolves when all that was yielded is in the layer's file. */
  readonly appended: (signal: AbortSignal) => Promise<void>;
  readonly pid: number;
}

/** What was copied ahead of the pause. */
export class Precopied {
  readonly #parent: ParentPages | 'none';
  /** Pages that the layer has some copy of. */
  #copied: PageBitmap;
  /** Those of which the newest copy may be other than zeroes. */
  #data: PageBitmap;
  /** Pages that no set has named since they were copied. */
  #current: PageBitmap;
  #rounds = 0;
  #pages = 0;

  constructor(parent: ParentPages | 'none', pageCount: PageCount) {
    this.#parent = parent;
    this.#copied = emptyBitmap(pageCount);
    this.#data = emptyBitmap(pageCount);
    this.#current = emptyBitmap(pageCount);
  }

  /** Rounds that were copied. */
  get rounds(): number {
    return this.#rounds;
  }

  /** Bytes copied in all rounds. */
  get bytes(): number {
    return this.#pages * PAGE_BYTES;
  }

  /** Pages that the pause does not have to copy. */
  get currentPages(): PageCount {
    return countPages(this.#current);
  }

  /** The memory parent with what was copied on top (P4). */
  get parent(): ParentPages | 'none' {
    if (this.#rounds === 0) return this.#parent;
    const over = this.#copied;
    if (this.#parent === 'none') return { aboveLaunch: over, data: this.#data, base: true };
    const { aboveLaunch, data } = this.#parent;
    return {
      aboveLaunch: union(aboveLaunch, over),
      data: union(without(data, over), this.#data),
    };
  }

  /** A round's set as the ledger takes it. */
  setsOf({ written, removed }: RoundSet): PageSets {
    const { parent } = this;
    if (parent === 'none') return { selected: written, zero: null };
    const zero = intersection(without(removed, written), parent.data);
    return { selected: written, zero: isEmptyBitmap(zero) ? null : zero };
  }

  /** Of `joined`, what has to be copied now that `fresh` is known to have changed (P3). */
  missing(fresh: PageSets, joined: PageSets): PageSets {
    this.#current = without(this.#current, fresh.selected);
    if (fresh.zero !== null) this.#current = without(this.#current, fresh.zero);
    return {
      selected: without(joined.selected, this.#current),
      zero: joined.zero === null ? null : without(joined.zero, this.#current),
    };
  }

  /** `sets` are being copied. */
  took(sets: PageSets): void {
    const all = sets.zero === null ? sets.selected : union(sets.selected, sets.zero);
    this.#copied = union(this.#copied, all);
    this.#data = union(without(this.#data, all), sets.selected);
    this.#current = union(this.#current, all);
    this.#rounds += 1;
    this.#pages += countPages(sets.selected);
  }
}

/** The sets to copy while the VM runs; `precopied` knows them afterwards. */
export async function* precopyRounds(
  config: PrecopyConfig,
  deps: PrecopyDeps,
  precopied: Precopied,
  signal: AbortSignal,
): AsyncIterable<SelectedSet> {
  let before = Infinity;
  for (let round = 0; round < config.rounds; round++) {
    signal.throwIfAborted();
    const told = await deps.round(signal);
    if (told === null) return;
    const fresh = precopied.setsOf(told);
    const joined = await deps.record(fresh);
    await deps.recorded(signal);
    const sets = precopied.missing(fresh, joined);
    const bytes = countPages(sets.selected) * PAGE_BYTES;
    const fits = precopied.bytes + bytes <= config.bytesMax;
    if (!fits || bytes <= config.smallBytes || bytes >= before) return;
    const source = { kind: 'process' as const, pid: deps.pid };
    const { layout } = told;
    precopied.took(sets);
    yield { ...sets, layout, source, vmStatePath: null, round, frozen: false };
    await deps.appended(signal);
    before = bytes;
  }
}
