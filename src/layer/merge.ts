/**
 * Merges a run of layers into one that reads the same above whatever the run sat on, and below
 * whatever comes on top: data past the size of the run's top layer stays, since a larger layer uncovers
 * it. Zeroed segments that still hide something below stay; in a base, none do. Memory is bounded by
 * the merged index and a few slabs.
 */
import type { Result } from '../result.ts';
import { err, Failure, ok } from '../result.ts';
import { bytes } from '../units.ts';
import type { Bytes, LayerUuid } from '../units.ts';
import { readError } from './errors.ts';
import type { LayerReadError, LayerWriteError } from './errors.ts';
import { rowSteps } from './flatten.ts';
import type { Progress } from './flatten.ts';
import type { Compression } from './format.ts';
import { LayerStack } from './layer-stack.ts';
import { LayerWriter } from './layer-writer.ts';
import type { SealedLayer } from './layer-writer.ts';
import { pumpRows, STEP_BYTES } from './pump.ts';

export interface MergeOptions {
  /** The run, bottom first. */
  readonly paths: readonly string[];
  readonly output: string;
  readonly uuid: LayerUuid;
  /** The layers below the run, bottom first: only zeroed segments over their data are kept. Left
   * out: none where the run's bottom has no parent, else unknown, and all zeroed segments stay. */
  readonly below?: readonly string[] | undefined;
  /** What the new layer names below it; left out: what the run's bottom names. */
  readonly parentUuid?: LayerUuid | null | undefined;
  readonly compression: Compression;
  readonly blockBytes: number;
  readonly order?: 'ignore' | 'check' | undefined;
  readonly signal: AbortSignal;
  readonly onProgress?: ((progress: Progress) => void) | undefined;
}

export interface MergedLayer {
  readonly sealed: SealedLayer;
  /** Data bytes copied, before compression. */
  readonly copiedBytes: Bytes;
  /** Read from the run's files for that, in stored form; headers and indexes not counted. */
  readonly readBytes: Bytes;
  /** Size of the new file. */
  readonly writtenBytes: Bytes;
}

function* shadowing(steps: Iterable<BigUint64Array>, below: LayerStack): Generator<BigUint64Array> {
  for (const rows of steps) {
    const kept = below.nativeReader().keepShadowing(rows);
    if (kept.length > 0) yield kept;
  }
}

async function writeMerged(
  run: LayerStack,
  below: LayerStack | null,
  options: MergeOptions,
): Promise<MergedLayer> {
  const bottom = run.layers[0];
  const parentUuid =
    options.parentUuid === undefined ? (bottom?.parentUuid ?? null) : options.parentUuid;
  const isBase = options.below === undefined ? parentUuid === null : options.below.length === 0;
  const reader = run.nativeReader();
  const steps = rowSteps(reader, STEP_BYTES, { withZeroed: !isBase, pastEnd: true });
  const readBefore = reader.fileBytesRead();
  await using writer = await LayerWriter.create({
    path: options.output,
    uuid: options.uuid,
    parentUuid,
    virtualBytes: run.virtualBytes,
    compression: options.compression,
    blockBytes: options.blockBytes,
  });
  await pumpRows({
    writer,
    path: options.output,
    compression: options.compression,
    blockBytes: options.blockBytes,
    steps: below === null ? steps : shadowing(steps, below),
    fill: async (slab, rows) => {
      const fault = await reader.readRows(slab, rows);
      if (fault !== null) throw new Failure(readError(fault, options.paths));
    },
    onStep: (end) => options.onProgress?.({ doneBytes: bytes(end), totalBytes: run.virtualBytes }),
    signal: options.signal,
  });
  const sealed = await writer.seal(options.signal);
  return {
    sealed,
    copiedBytes: sealed.dataBytes,
    readBytes: bytes(reader.fileBytesRead() - readBefore),
    writtenBytes: sealed.sizeBytes,
  };
}

type MergeError = LayerReadError | LayerWriteError;

/** Fails as reading and writing do; then there is no output file. */
export async function mergeLayers(options: MergeOptions): Promise<Result<MergedLayer, MergeError>> {
  const order = options.order ?? 'check';
  const opened = await LayerStack.open(options.paths, { order, partial: true });
  if (!opened.ok) return opened;
  await using run = opened.value;
  const hasBelow = options.below !== undefined && options.below.length > 0;
  const under = hasBelow ? await LayerStack.open(options.below) : null;
  if (under !== null && !under.ok) return under;
  await using below = under?.value ?? null;
  try {
    return ok(await writeMerged(run, below, options));
  } catch (error) {
    if (error instanceof Failure) return err((error as Failure<MergeError>).detail);
    throw error;
  }
}
