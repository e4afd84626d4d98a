/**
 * Finds what of a batch must be stored. In: slabs of bytes, ascending. Out: segments. Zero pages
 * become zeroed segments on top of a parent (a hole would show the parent's old bytes) and nothing
 * in a base layer; pages equal to what the parent reads are dropped where asked; ZFile blocks are
 * compressed where asked. Fails: `parent-unreadable`.
 */
import { mapOrdered } from '../pipeline/map-ordered.ts';
import type { PoolClient } from '../pipeline/pool.ts';
import type { SlabHolder } from '../pipeline/slabs.ts';
import type { Stage } from '../pipeline/stage.ts';
import { Failure } from '../result.ts';
import { PAGE_BYTES } from '../units.ts';
import { ZEROED_ROW } from '../layer/format.ts';
import type { SharedStack } from '../layer/shared-stack.ts';
import type { PageBatch, Segments } from './items.ts';
import { compactOperation, type CompactOutcome, type CompactTask } from './operations.ts';

export interface CompactConfig {
  readonly inFlightMax: number;
  readonly compression: 'none' | 'lz4' | 'zstd';
  readonly blockBytes: number;
}

export interface CompactDeps {
  readonly pool: PoolClient;
  /** Gives back the read stage's slabs once their bytes are compressed. */
  readonly slabs: SlabHolder;
  /** Slabs for compressed blocks: a set of their own, so that read slabs can't starve them. */
  readonly compressedSlabs: SlabHolder | null;
  readonly hasParent: boolean;
  /** What the memory parent reads, when equal pages are to be dropped. */
  readonly dedupAgainst: SharedStack | null;
  /** Told of the pages that no dirty set named and that differ from the memory parent; null: none come. */
  readonly verify: {
    readonly stack: SharedStack | null;
    readonly found: (rows: BigUint64Array) => void;
  } | null;
  readonly count: (pages: { readonly zeroPages: number; readonly equalPages: number }) => void;
}

export function compactPages(config: CompactConfig, deps: CompactDeps): Stage<PageBatch, Segments> {
  return {
    name: 'compact',
    async *run(input, { meter, signal, failed }) {
      meter.start();
      const limits = { inFlightMax: config.inFlightMax, signal, failed };
      yield* mapOrdered(input, limits, (batch) =>
        batch.kind === 'zeros'
          ? Promise.resolve(zeroSegments(batch, config, deps))
          : meter.item(batch.bytes, () => compactBatch(batch, config, deps)),
      );
      meter.end();
    },
  };
}

/** A layer of compressed blocks takes nothing else, and here there is none. */
const noBlocks = { blocks: new Uint8Array(0), lengths: new Uint32Array(0) };

/** Something below would show through a page that is left out: the parent, or a copy made ahead. */
const mayShow = (batch: PageBatch, deps: CompactDeps): boolean => deps.hasParent || batch.round > 0;

function zeroSegments(
  batch: PageBatch & { readonly kind: 'zeros' },
  config: CompactConfig,
  deps: CompactDeps,
): Segments {
  const kept = mayShow(batch, deps) ? batch.rows : new BigUint64Array(0);
  const rows = new BigUint64Array(kept.length);
  for (let row = 0; row < kept.length; row += 3) {
    rows[row] = kept[row + 1] ?? 0n;
    rows[row + 1] = kept[row + 2] ?? 0n;
    rows[row + 2] = ZEROED_ROW;
  }
  deps.count({ zeroPages: batch.bytes / PAGE_BYTES, equalPages: 0 });
  const zeros = { slab: new Uint8Array(0), rows };
  const compressed = config.compression === 'none' ? {} : { compressed: noBlocks };
  return { batch: { ...zeros, ...compressed }, slabs: [], bytes: 0, round: batch.round };
}

async function compactBatch(
  batch: PageBatch & { readonly kind: 'pages' },
  config: CompactConfig,
  deps: CompactDeps,
): Promise<Segments> {
  const out = config.compression === 'none' ? null : await acquireOut(deps);
  const task: CompactTask = {
    slabOffset: batch.slab.offset,
    bytes: batch.bytes,
    rows: batch.rows,
    keepZeros: mayShow(batch, deps),
    parent: comparedWith(batch, deps),
    compress:
      config.compression === 'none' || out === null
        ? null
        : {
            algorithm: config.compression,
            blockBytes: config.blockBytes,
            slabOffset: out.offset,
          },
  };
  const outcome = await deps.pool.run(compactOperation, task);
  if (outcome.failure !== null) throw new Failure(outcome.failure);
  if (batch.unnamed) deps.verify?.found(outcome.rows);
  else deps.count(outcome);
  return segmentsOf(batch, outcome, out, deps);
}

function comparedWith(
  batch: PageBatch & { readonly kind: 'pages' },
  deps: CompactDeps,
): SharedStack | null {
  if (batch.unnamed) return deps.verify?.stack ?? null;
  // Not over a copy made ahead: a page that is as the parent's again must hide it.
  return batch.round > 0 ? null : deps.dedupAgainst;
}

function acquireOut(deps: CompactDeps): ReturnType<SlabHolder['acquire']> {
  if (deps.compressedSlabs === null) throw new Error('no slabs for compressed blocks');
  return deps.compressedSlabs.acquire();
}

function segmentsOf(
  batch: PageBatch & { readonly kind: 'pages' },
  outcome: CompactOutcome,
  out: Awaited<ReturnType<SlabHolder['acquire']>> | null,
  deps: CompactDeps,
): Segments {
  if (out === null || outcome.compressed === null) {
    const { slab, bytes, round } = batch;
    return { batch: { slab: slab.view, rows: outcome.rows }, slabs: [slab], bytes, round };
  }
  deps.slabs.release(batch.slab);
  return {
    batch: { slab: out.view, rows: outcome.rows, compressed: outcome.compressed },
    slabs: [out],
    bytes: batch.bytes,
    round: batch.round,
  };
}
