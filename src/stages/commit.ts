/**
 * Writes segments into one layer and seals it; then the epoch is committed. In: segments. Out: one
 * committed layer. Data is appended as it comes; the index, trailer, fsync, rename and digest
 * follow the last. Fails: as the layer writer (`layer-no-space`, `layer-io`, …), `vm-exited`,
 * `vm-replaced`; nothing is left of a layer that was not sealed.
 */
import { crashPoint } from '../crash-points.ts';
import type { LayerWriter, SealedLayer } from '../layer/layer-writer.ts';
import type { SlabHolder } from '../pipeline/slabs.ts';
import type { Slab } from '../pipeline/slabs.ts';
import type { Stage } from '../pipeline/stage.ts';
import { mapOrdered } from '../pipeline/map-ordered.ts';
import type { LayerUuid } from '../units.ts';
import type { CommittedLayer, Segments } from './items.ts';

export interface CommitConfig {
  /** Appends handed to the writer and not yet in the file. */
  readonly inFlightMax: number;
}

export interface CommitDeps {
  readonly writer: LayerWriter;
  readonly predecessor: LayerUuid | null;
  readonly release: (slab: Slab) => void;
  /** Told of each batch that is with the writer's file. */
  readonly appended: () => void;
  /** Resolves when the ledger has the epoch's set: nothing is sealed before. */
  readonly recorded: () => Promise<void>;
  /**
   * The VM's state is durable when it resolves: begun with the seal, awaited before the commit
   * point.
   */
  readonly syncVmState: () => Promise<void>;
  /** The file gets its final name now: from here an abort must remove it. */
  readonly sealing: () => void;
  /**
   * Step 4 → 5: the layer is sealed, then memory parent, epoch and ledger change in one
   * transaction.
   */
  readonly commitEpoch: (sealed: SealedLayer) => void;
  /** The VM may run: its epoch is durable. */
  readonly committed: () => Promise<void>;
}

export function commitLayer(
  config: CommitConfig,
  deps: CommitDeps,
): Stage<Segments, CommittedLayer> {
  return {
    name: 'commit',
    async *run(input, { meter, signal, failed }) {
      meter.start();
      const limits = { inFlightMax: config.inFlightMax, signal, failed };
      let round = 0;
      const appended = mapOrdered(input, limits, (segments) =>
        meter.item(segments.bytes, async () => {
          // Calls begin in order, and the writer takes batches in the order of its calls.
          if (segments.round !== round) deps.writer.supersede();
          round = segments.round;
          if (segments.batch.rows.length > 0) await deps.writer.append(segments.batch);
          crashPoint('copy-running');
          for (const slab of segments.slabs) deps.release(slab);
          deps.appended();
        }),
      );
      for await (const done of appended) void done;
      await deps.recorded();
      deps.sealing();
      const synced = deps.syncVmState();
      // A failure is thrown below; until then it must not count as unhandled.
      synced.catch(() => undefined);
      const sealed = await meter.item(0, () => deps.writer.seal(signal));
      await synced;
      signal.throwIfAborted();
      deps.commitEpoch(sealed);
      meter.end();
      await deps.committed();
      yield { sealed, predecessor: deps.predecessor };
    },
  };
}

/** Gives a slab back to whichever holder has it. */
export function releaseTo(
  slabs: SlabHolder,
  compressedSlabs: SlabHolder | null,
): (slab: Slab) => void {
  return (slab) => {
    if (compressedSlabs?.holds(slab) === true) compressedSlabs.release(slab);
    else slabs.release(slab);
  };
}
