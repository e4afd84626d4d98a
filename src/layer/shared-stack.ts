/**
 * A stack in shared memory, readable from any thread: index, jump tables and descriptors, nothing
 * else. Valid until the `LayerStack` it came from is disposed; later calls fail with
 * `layer-closed`, and never read another file's bytes, since the last reader out closes the
 * descriptors.
 */
import { nativeLayer } from '../native/layer.ts';
import type { NativeStackReader } from '../native/layer.ts';
import type { Result } from '../result.ts';
import { err, ok } from '../result.ts';
import type { Bytes } from '../units.ts';
import { PAGE_BYTES } from '../units.ts';
import { readError } from './errors.ts';
import type { LayerReadError } from './errors.ts';
import { ROW_COLUMNS } from './format.ts';

/** Plain data: goes through `postMessage` and `workerData`. */
export interface SharedStack {
  /** Never reused in this process: what a thread's reader is kept under. */
  readonly id: string;
  readonly pack: SharedArrayBuffer;
  /** Bottom first. */
  readonly paths: readonly string[];
  readonly virtualBytes: Bytes;
}

/** Decompressed blocks that one thread keeps of one stack. */
export const BLOCK_CACHE_BYTES = 8 * 1024 * 1024;
/** Stacks that one thread keeps readers for. */
const READERS_MAX = 16;

const readers = new Map<string, NativeStackReader>();

/** This thread's reader of a stack. Least recently used ones are dropped. */
export function readerOf(stack: SharedStack): NativeStackReader {
  const known = readers.get(stack.id);
  if (known !== undefined) {
    readers.delete(stack.id);
    readers.set(stack.id, known);
    return known;
  }
  const reader = new (nativeLayer().StackReader)(new Uint8Array(stack.pack), BLOCK_CACHE_BYTES);
  for (const [id, old] of readers) {
    if (readers.size >= READERS_MAX || old.isClosed()) readers.delete(id);
  }
  readers.set(stack.id, reader);
  return reader;
}

export function forgetReader(stack: SharedStack): void {
  readers.delete(stack.id);
}

export interface CompareRequest {
  readonly stack: SharedStack;
  readonly slab: Uint8Array;
  /** As in SegmentBatch, whole pages. Zeroed rows are compared with what the stack reads there. */
  readonly rows: BigUint64Array;
  /** Non-zero at `cancelIndex` stops between reads. */
  readonly cancel?: Int32Array;
  readonly cancelIndex?: number;
}

/**
 * Which pages hold, byte for byte, what the stack reads at their place. Bit i, least significant
 * first, is page i counted through the rows in order. Blocks the calling thread: for workers, a
 * batch at a time. Reads only what it compares, from the page cache in large pieces.
 */
export function compareWithStack(request: CompareRequest): Result<Uint8Array, LayerReadError> {
  const { stack, slab, rows, cancel, cancelIndex } = request;
  let length = 0n;
  for (let i = 1; i < rows.length; i += ROW_COLUMNS) length += rows[i] ?? 0n;
  const equal = new Uint8Array(Math.ceil(Number(length) / PAGE_BYTES / 8));
  const fault = readerOf(stack).compare(slab, rows, equal, cancel, cancelIndex ?? 0);
  return fault === null ? ok(equal) : err(readError(fault, stack.paths));
}

/** Image bytes on the calling thread; blocks. Holes and what is past the end are zero. */
export function readStackNow(
  stack: SharedStack,
  offset: Bytes,
  into: Uint8Array,
): Result<void, LayerReadError> {
  const fault = readerOf(stack).readNow(into, offset);
  return fault === null ? ok(undefined) : err(readError(fault, stack.paths));
}
