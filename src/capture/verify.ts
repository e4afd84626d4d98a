/**
 * A verifying capture trusts no dirty set: beside the pages that its set names, it reads every other
 * page of the paused VM and compares it with what the memory parent reads there. A page that differs
 * was lost by an earlier capture or is missing in the set of this one. It is stored, so that the
 * snapshot of a verifying capture is exact; the snapshots since the last one that was found to be are
 * suspect.
 */
import { ROW_COLUMNS } from '../layer/format.ts';
import type { SharedStack } from '../layer/shared-stack.ts';
import type { PageSets } from '../lineage/page-sets.ts';
import type { SelectedSet } from '../stages/items.ts';
import { PAGE_BYTES } from '../units.ts';
import { countPages } from '../vmm/bitmap.ts';
import type { ProcessIdentity } from '../vmm/identity.ts';
import type { FetchedSet, ParentPages } from '../vmm/source.ts';
import { isPlaced, unnamedPages } from '../vmm/unnamed.ts';
import { orThrow } from './failure.ts';

/** Of the pages that the set did not name: what a comparison found, or why there was none. */
export type VerifyReport =
  | {
      readonly compared: 'all';
      /** Pages that were read and compared. */
      readonly pages: number;
      /** Those that did not read as the memory parent does. */
      readonly differing: number;
      /** The first of them, ascending; bytes in the image. */
      readonly ranges: readonly { readonly imageOffset: number; readonly length: number }[];
    }
  | { readonly compared: 'nothing'; readonly reason: string };

/** Ranges that a report names. */
const rangesMax = 64;

export interface VerifyOf {
  readonly identity: ProcessIdentity;
  /** The open memory parent; null where there is none. */
  readonly stack: SharedStack | null;
  readonly parentPages: ParentPages | 'none';
}

export class Verification {
  readonly stack: SharedStack | null;
  readonly #of: VerifyOf;
  #pages = 0;
  #ranges: { imageOffset: number; length: number }[] = [];
  #differing = 0;
  #reason: string | null = 'the capture ended before';

  constructor(of: VerifyOf) {
    this.#of = of;
    this.stack = of.stack;
  }

  /** The pages to compare; null where there is nothing to compare them with, or they can't be read. */
  async rest(
    fetched: Pick<FetchedSet, 'layout'>,
    named: PageSets,
    signal: AbortSignal,
  ): Promise<Omit<SelectedSet, 'vmStatePath' | 'round'> | null> {
    const { identity, parentPages } = this.#of;
    const { layout } = fetched;
    if (parentPages === 'none' || this.stack === null) {
      this.#reason = 'there is no memory parent yet';
      return null;
    }
    if (!isPlaced(layout)) {
      this.#reason = 'it is not known where the VMM has its guest memory';
      return null;
    }
    const rest = await unnamedPages(identity, layout, named, parentPages, signal);
    const selected = orThrow(rest);
    this.#pages = countPages(selected);
    this.#reason = null;
    const source = { kind: 'process' as const, pid: identity.pid };
    return { layout, selected, zero: null, source, frozen: true, unnamed: true };
  }

  /** @param rows rows of 3 of a batch's pages that differ: image offset, length, any; bytes */
  found(rows: BigUint64Array): void {
    for (let row = 0; row < rows.length; row += ROW_COLUMNS) {
      const imageOffset = Number(rows[row] ?? 0n);
      const length = Number(rows[row + 1] ?? 0n);
      this.#differing += length / PAGE_BYTES;
      const last = this.#ranges.at(-1);
      if (last !== undefined && last.imageOffset + last.length === imageOffset) {
        last.length += length;
      } else if (this.#ranges.length < rangesMax) this.#ranges.push({ imageOffset, length });
    }
  }

  report(): VerifyReport {
    if (this.#reason !== null) return { compared: 'nothing', reason: this.#reason };
    return {
      compared: 'all',
      pages: this.#pages,
      differing: this.#differing,
      ranges: this.#ranges,
    };
  }
}

/** Pages that were lost; 0 where none were, or nothing was compared. */
export const lostPages = (report: VerifyReport | null): number =>
  report?.compared === 'all' ? report.differing : 0;

/** Every page was compared, and none had been lost. */
export function foundRight(verification: Verification | null): boolean {
  const report = verification?.report();
  return report?.compared === 'all' && report.differing === 0;
}
