/**
 * Asks for the dirty set of a paused VM, and makes its union with what aborted epochs left behind
 * durable before anything else may fail. In: the paused VM. Out: the pages to capture. Fails: as
 * the dirty source and the ledger.
 */
import type { FetchedSet } from '../vmm/source.ts';
import type { PageBitmap } from '../memory.ts';
import type { Stage } from '../pipeline/stage.ts';
import type { ByteSource, PausedVm, SelectedSet } from './items.ts';

export interface DirtyBitmapDeps {
  /** Reads the set; for a VMM that hands out the bytes with it, writes them beside. */
  readonly fetch: (signal: AbortSignal) => Promise<FetchedSet>;
  /** Step 3 of an epoch: durable when it returns. */
  readonly record: (fetched: FetchedSet) => {
    readonly selected: PageBitmap;
    readonly zero: PageBitmap | null;
  };
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
          const union = deps.record(fetched);
          return { ...union, layout: fetched.layout, vmStatePath: fetched.vmStatePath, fetched };
        });
        meter.end();
        const source = byteSource(set.fetched, set.selected, deps);
        if (source.kind === 'file') deps.staged();
        yield {
          layout: set.layout,
          selected: set.selected,
          zero: set.zero,
          source,
          vmStatePath: set.vmStatePath,
        };
      }
    },
  };
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
