/**
 * Asks for the dirty set of a paused VM, and has its union with what aborted epochs left behind
 * recorded. In: the paused VM. Out: the pages to capture. Fails: as the dirty source and the ledger.
 *
 * Where the bytes stay in the process, the frozen VM does not wait for the ledger to reach the disk:
 * such a source does not clear, so a crash before that loses nothing (ADR 0041). No layer is sealed
 * before. Where the VMM handed the bytes out, the ledger comes first.
 */
import type { FetchedSet } from '../vmm/source.ts';
import type { PageBitmap } from '../memory.ts';
import type { Stage } from '../pipeline/stage.ts';
import type { ByteSource, PausedVm, SelectedSet } from './items.ts';

interface Sets {
  readonly selected: PageBitmap;
  readonly zero: PageBitmap | null;
}

export interface DirtyBitmapDeps {
  /** Reads the set; for a VMM that hands out the bytes with it, writes them beside. */
  readonly fetch: (signal: AbortSignal) => Promise<FetchedSet>;
  /** What this epoch's layer must hold: the set joined with the ledger. Changes nothing. */
  readonly join: (fetched: FetchedSet) => Sets;
  /** Asks what can be asked while pages are read, or the ledger is written. */
  readonly confirm: (fetched: FetchedSet, signal: AbortSignal) => Promise<void>;
  /** Step 3 of an epoch: durable when it resolves. */
  readonly record: (fetched: FetchedSet) => Promise<void>;
  /** As `record`, at a time that does not hold the VM up, and before a layer is sealed. */
  readonly recordLater: (fetched: FetchedSet) => void;
  /** The pages that no set names, where they are to be compared too; else null. */
  readonly rest: (
    fetched: FetchedSet,
    named: Sets,
    signal: AbortSignal,
  ) => Promise<Omit<SelectedSet, 'vmStatePath' | 'round'> | null>;
  /** Where pages are read from that the fetched bytes do not cover. */
  readonly pid: number;
  /** Sets of this capture that came before. */
  readonly rounds: () => number;
  readonly countPages: (bitmap: PageBitmap) => number;
  /** Nothing more is read of the VM. Throws `vm-ran` where the guest ran since its state was saved. */
  readonly stoodStill: (signal: AbortSignal) => Promise<void>;
  /** The VMM has handed out the bytes with the set: the VM may run. */
  readonly staged: () => void;
}

export function fetchDirtyBitmap(deps: DirtyBitmapDeps): Stage<PausedVm, SelectedSet> {
  return {
    name: 'dirty-bitmap',
    async *run(input, { meter, signal }) {
      for await (const paused of input) {
        void paused;
        signal.throwIfAborted();
        const set = await meter.item(0, async () => {
          const fetched = await deps.fetch(signal);
          const union = deps.join(fetched);
          if (fetched.bytes.kind === 'file') await recordAndConfirm(fetched, deps, signal);
          const rest = await deps.rest(fetched, union, signal);
          return { union, fetched, rest };
        });
        meter.end();
        const { union, fetched, rest } = set;
        const { layout, vmStatePath } = fetched;
        const of = { vmStatePath, round: deps.rounds() };
        const source = byteSource(fetched, union.selected, deps);
        const sets = [{ ...union, ...of, layout, source, frozen: true }];
        if (rest !== null) sets.push({ ...rest, ...of });
        if (source.kind === 'file' && rest === null) {
          await deps.stoodStill(signal);
          deps.staged();
        }
        if (fetched.bytes.kind === 'file') {
          yield* sets;
          continue;
        }
        deps.recordLater(fetched);
        const confirmed = deps.confirm(fetched, signal);
        // Thrown below: the copy has not ended before.
        confirmed.catch(() => undefined);
        try {
          yield* sets;
        } finally {
          await confirmed;
        }
      }
    },
  };
}

/** What fails first, once both have ended: the set is in the ledger even where the VM ran. */
async function recordAndConfirm(
  fetched: FetchedSet,
  deps: DirtyBitmapDeps,
  signal: AbortSignal,
): Promise<void> {
  const ends = await Promise.allSettled([deps.record(fetched), deps.confirm(fetched, signal)]);
  const failed = ends.find((end) => end.status === 'rejected');
  if (failed !== undefined) throw failed.reason;
}

/**
 * A memory file holds the pages of its own set only; what an aborted epoch left is read from the
 * process.
 */
function byteSource(fetched: FetchedSet, selected: PageBitmap, deps: DirtyBitmapDeps): ByteSource {
  const { bytes } = fetched;
  if (bytes.kind === 'process') return { kind: 'process', pid: deps.pid };
  const all = deps.countPages(selected) === deps.countPages(fetched.selected);
  return all ? bytes : { kind: 'process', pid: deps.pid };
}
