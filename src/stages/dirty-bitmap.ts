/**
 * Asks for the dirty set of a paused VM, and makes its union with what aborted epochs left behind
 * durable. In: the paused VM. Out: the pages to capture. Fails: as the dirty source and the ledger.
 *
 * Where the bytes stay in the process, the first pages are read while the ledger reaches the disk
 * (ADR 0041): the stage does not end before it has, so neither does the copy; until then the VM is
 * frozen and no layer is sealed. Where the VMM handed the bytes out, the ledger comes first.
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
  /** Asks what can be asked while pages are read. */
  readonly confirm: (fetched: FetchedSet, signal: AbortSignal) => Promise<void>;
  /** Step 3 of an epoch: durable when it resolves. */
  readonly record: (fetched: FetchedSet) => Promise<void>;
  /** Where pages are read from that the fetched bytes do not cover. */
  readonly pid: number;
  readonly countPages: (bitmap: PageBitmap) => number;
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
          if (fetched.bytes.kind === 'file') await deps.record(fetched);
          return { ...union, layout: fetched.layout, vmStatePath: fetched.vmStatePath, fetched };
        });
        const { fetched } = set;
        const recorded = finish(fetched, deps, signal).then(() => meter.end());
        // A failure is thrown below; until then it must not count as unhandled.
        recorded.catch(() => undefined);
        const source = byteSource(fetched, set.selected, deps);
        if (source.kind === 'file') deps.staged();
        try {
          yield {
            layout: set.layout,
            selected: set.selected,
            zero: set.zero,
            source,
            vmStatePath: set.vmStatePath,
          };
        } finally {
          await recorded;
        }
      }
    },
  };
}

async function finish(
  fetched: FetchedSet,
  deps: DirtyBitmapDeps,
  signal: AbortSignal,
): Promise<void> {
  if (fetched.bytes.kind === 'file') return;
  const confirmed = deps.confirm(fetched, signal);
  // Thrown below, once the ledger has the set.
  confirmed.catch(() => undefined);
  await readsAreSent();
  await deps.record(fetched);
  await confirmed;
}

/** The first reads are with the workers: what was yielded before this turn has been taken up. */
const readsAreSent = (): Promise<void> => new Promise((resolve) => void setImmediate(resolve));

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
