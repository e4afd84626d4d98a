/**
 * Moves rows from a source to a writer: several slabs in flight, compressed where the layer is,
 * appended in order. Memory: SLABS × (step + its compressed form), however large the image.
 */
import { Failure } from '../result.ts';
import { compressBatchAsync, compressBound } from './compress.ts';
import type { LayerWriteError } from './errors.ts';
import { ROW_COLUMNS } from './format.ts';
import type { Compression } from './format.ts';
import type { LayerWriter, SegmentBatch } from './layer-writer.ts';

/** Bytes of data rows in one step, at most. */
export const STEP_BYTES = 4 * 1024 * 1024;
/** Rows in one step, at most. */
export const STEP_ROWS = 4096;
/** Steps in flight: as many as libuv has threads by default. */
const SLABS = 4;

export interface PumpOptions {
  readonly writer: LayerWriter;
  readonly path: string;
  readonly compression: Compression;
  readonly blockBytes: number;
  /** Steps of rows; data rows take slab offsets within STEP_BYTES. */
  readonly steps: Iterable<BigUint64Array>;
  /** Reads the data rows' bytes to their slab offsets; throws Failure. */
  readonly fill: (slab: Uint8Array, rows: BigUint64Array) => Promise<void>;
  /** Called in order, after a step's bytes are in the file, with the image offset it ends at. */
  readonly onStep?: ((endOffset: number) => void) | undefined;
  readonly signal: AbortSignal;
}

interface Lane {
  readonly slab: Uint8Array;
  readonly out: Uint8Array | null;
  busy: Promise<void>;
}

function makeLanes({ compression, blockBytes }: PumpOptions): Lane[] {
  return Array.from({ length: SLABS }, () => ({
    slab: new Uint8Array(STEP_BYTES),
    out:
      compression === 'none'
        ? null
        : new Uint8Array(compressBound(compression, blockBytes, STEP_BYTES)),
    busy: Promise.resolve(),
  }));
}

const lastEnd = (rows: BigUint64Array): number => {
  const at = rows.length - ROW_COLUMNS;
  return Number((rows[at] ?? 0n) + (rows[at + 1] ?? 0n));
};

export const cancelledWrite = (path: string): LayerWriteError => ({
  kind: 'layer-cancelled',
  message: `writing ${path} was cancelled`,
  path,
});

async function prepare(
  options: PumpOptions,
  lane: Lane,
  rows: BigUint64Array,
): Promise<SegmentBatch> {
  const { compression, blockBytes } = options;
  await options.fill(lane.slab, rows);
  if (compression === 'none' || lane.out === null) return { slab: lane.slab, rows };
  const { slab, out } = lane;
  const made = await compressBatchAsync({ slab, rows, out, algorithm: compression, blockBytes });
  if (made === null) throw new Error('compressBound was too small');
  return { slab, rows, compressed: made };
}

/** Settles only when both have, so that a lane that is still no longer uses its slab. */
async function appendAfter(
  options: PumpOptions,
  before: Promise<void>,
  prepared: Promise<SegmentBatch>,
  endOffset: number,
): Promise<void> {
  const [earlier, batch] = await Promise.allSettled([before, prepared]);
  if (earlier.status === 'rejected') throw earlier.reason;
  if (batch.status === 'rejected') throw batch.reason;
  await options.writer.append(batch.value);
  options.onStep?.(endOffset);
}

/** Resolves once every step is appended; throws Failure of the first that is not. */
export async function pumpRows(options: PumpOptions): Promise<void> {
  const lanes = makeLanes(options);
  let tail = Promise.resolve();
  let turn = 0;
  try {
    for (const rows of options.steps) {
      const lane = lanes[turn % SLABS];
      if (lane === undefined) throw new Error('no lane');
      turn += 1;
      await lane.busy;
      if (options.signal.aborted) throw new Failure(cancelledWrite(options.path));
      const before = tail;
      const prepared = prepare(options, lane, rows);
      lane.busy = appendAfter(options, before, prepared, lastEnd(rows));
      tail = lane.busy;
      tail.catch(() => undefined); // awaited when its lane's turn comes, or below
    }
    await tail;
  } finally {
    // Slabs are in use until every lane is still, also after a failure.
    await Promise.allSettled(lanes.map((lane) => lane.busy));
  }
}
