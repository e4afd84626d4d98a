/**
 * Blocks for compressed layers, made where the bytes are: in workers. Each batch starts a block of
 * its own, so batches are compressed independently and appended in any order.
 */
import { nativeLayer } from '../native/layer.ts';
import { codecOf } from './format.ts';
import type { Compression } from './format.ts';

/** The data rows of one batch as ZFile blocks, the last padded with zeros. */
export interface CompressedBatch {
  /** Blocks with their CRCs, one after another: the used part of `out`. */
  readonly blocks: Uint8Array;
  /** Stored length of each block, bytes, CRC included. */
  readonly lengths: Uint32Array;
}

export interface CompressRequest {
  readonly slab: Uint8Array;
  /** As in SegmentBatch; zeroed rows take no bytes. */
  readonly rows: BigUint64Array;
  /** Room for the blocks: `compressBound` of the rows' bytes always suffices. */
  readonly out: Uint8Array;
  readonly algorithm: Exclude<Compression, 'none'>;
  readonly blockBytes: number;
}

/** Most bytes that `length` bytes of rows can take, CRCs included. */
export const compressBound = (
  algorithm: Exclude<Compression, 'none'>,
  blockBytes: number,
  length: number,
): number => nativeLayer().compressBound(codecOf[algorithm], blockBytes, length);

/** Compresses on the calling thread, for workers. Null where `out` is too small. */
export function compressBatch(request: CompressRequest): CompressedBatch | null {
  const { slab, rows, out, algorithm, blockBytes } = request;
  const made = nativeLayer().compressNow(slab, rows, out, codecOf[algorithm], blockBytes);
  return made === null ? null : { blocks: out.subarray(0, made.bytes), lengths: made.lengths };
}

/** The same on libuv's thread pool. */
export async function compressBatchAsync(
  request: CompressRequest,
): Promise<CompressedBatch | null> {
  const { slab, rows, out, algorithm, blockBytes } = request;
  const made = await nativeLayer().compress(slab, rows, out, codecOf[algorithm], blockBytes);
  return made === null ? null : { blocks: out.subarray(0, made.bytes), lengths: made.lengths };
}
