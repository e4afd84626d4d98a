/**
 * What the worker threads do for the read and compact stages. Expected failures are part of the
 * value: an Error from a thread loses its own fields.
 */
import type { CompressedBatch } from '../layer/compress.ts';
import type { SharedStack } from '../layer/shared-stack.ts';
import { compiledSibling, type WorkerOperation } from '../pipeline/pool.ts';

export interface ReadTask {
  readonly source:
    | { readonly kind: 'process'; readonly pid: number }
    | { readonly kind: 'file'; readonly fd: number };
  /** Rows of 3: host address, image offset, length; bytes. */
  readonly rows: BigUint64Array;
  readonly slabOffset: number;
  readonly bytes: number;
  readonly cancelSlot: number;
  readonly noMemoryDeadlineMs: number;
}

export interface ReadOutcome {
  /** False without an error: cancelled. */
  readonly done: boolean;
  /** 0, or the errno of the call that failed. */
  readonly error: number;
  /** Where it failed: address in the process, or offset in the file. */
  readonly address: bigint;
  readonly syscalls: number;
}

export const readOperation: WorkerOperation<ReadTask, ReadOutcome> = {
  name: 'read',
  short: true,
};

export interface CompactTask {
  readonly slabOffset: number;
  readonly bytes: number;
  /** Rows of 3: image offset, length, offset in the slab; bytes, packed in row order. */
  readonly rows: BigUint64Array;
  /**
   * True on top of a parent: zero pages become zeroed segments. False in a base layer: they are
   * dropped.
   */
  readonly keepZeros: boolean;
  /** What the memory parent reads, where equal pages are to be dropped. */
  readonly parent: SharedStack | null;
  readonly compress: {
    readonly algorithm: 'lz4' | 'zstd';
    readonly blockBytes: number;
    /** The slab that takes the compressed blocks. */
    readonly slabOffset: number;
  } | null;
}

export interface CompactOutcome {
  /** Rows of 3: image offset, length, offset in the slab or `ZEROED_ROW`; bytes. */
  readonly rows: BigUint64Array;
  readonly compressed: CompressedBatch | null;
  readonly zeroPages: number;
  readonly equalPages: number;
  /** Set when the parent could not be read. */
  readonly failure: { readonly kind: string; readonly message: string } | null;
}

export const compactOperation: WorkerOperation<CompactTask, CompactOutcome> = { name: 'compact' };

/** The compiled module that worker threads load. */
export const workerFile: string = compiledSibling(import.meta.url, './worker.ts');
