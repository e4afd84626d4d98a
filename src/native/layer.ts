/**
 * The native half of layers: files are parsed, read, compared, compressed and written in C++; this
 * face only names the functions. Methods that do I/O run on libuv's thread pool and resolve to a
 * fault or null. Source: native/core/layer_*.hpp.
 */
import { loadAddon } from './load.ts';

/** What is wrong, as native code says it; null where nothing is. */
export interface NativeFault {
  readonly kind: string;
  readonly field: string;
  /** Bytes, into the file or the content inside its ZFile. */
  readonly offset: number;
  readonly value: bigint;
  /** The system's error number, 0 where the system did not fail. */
  readonly errno: number;
  /** Position in the stack, bottom = 0. */
  readonly layer: number;
}

/** A staged batch, opaque: bytes with their place in the file. */
export interface StagedBatch {
  readonly stagedBatch: never;
}

export interface NativeSinkTotals {
  readonly fileBytes: number;
  readonly dataBytes: number;
  /** Stored too, and not reached by the index: newer bytes won. */
  readonly supersededBytes: number;
  readonly zeroedBytes: number;
  readonly segments: number;
  /** 64 hex digits; empty before `finish` (raw) or `hashFile` (compressed). */
  readonly digest: string;
}

/** One layer file being written. The order of calls is that of native/core/layer_sink.hpp. */
export interface NativeLayerSink {
  open(): Promise<NativeFault | null>;
  stage(slab: Uint8Array, rows: BigUint64Array): StagedBatch;
  stageBlocks(
    slab: Uint8Array,
    rows: BigUint64Array,
    blocks: Uint8Array,
    lengths: Uint32Array,
  ): StagedBatch;
  /** What is staged from now on wins over what was staged before. */
  supersede(): NativeFault | null;
  /** `keep` is the array that the batch's bytes are in; it must not change until this resolves. */
  write(batch: StagedBatch, keep: Uint8Array): Promise<NativeFault | null>;
  hash(batch: StagedBatch, keep: Uint8Array): Promise<NativeFault | null>;
  finish(): Promise<NativeFault | null>;
  sync(): Promise<NativeFault | null>;
  hashFile(): Promise<NativeFault | null>;
  publish(): Promise<NativeFault | null>;
  abandon(): Promise<NativeFault | null>;
  totals(): NativeSinkTotals;
}

/** 0 none, 1 lz4, 2 zstd: the numbers that ZFile headers store. */
export type NativeCodec = 0 | 1 | 2;

/** What was read of one layer's headers. Sizes and offsets in bytes. */
export interface NativeLayerFacts {
  readonly fileBytes: number;
  readonly device: bigint;
  readonly inode: bigint;
  readonly tar: boolean;
  readonly bodyOffset: number;
  readonly bodyBytes: number;
  readonly codec: NativeCodec;
  /** Of the ZFile; 0 where there is none. */
  readonly blockBytes: number;
  readonly blocks: number;
  /** Blocks carry CRCs. */
  readonly verify: boolean;
  readonly zfileFlags: number;
  /** LSMT header to trailer. */
  readonly contentBytes: number;
  /** Between index and trailer. */
  readonly gapBytes: number;
  readonly headerFlags: number;
  readonly trailerFlags: number;
  readonly indexOffset: number;
  /** Padding included. */
  readonly indexEntries: number;
  readonly segments: number;
  readonly virtualBytes: number;
  readonly headerVirtualBytes: number;
  readonly uuid: string;
  readonly parentUuid: string;
  readonly headerUuid: string;
  readonly headerParentUuid: string;
  readonly userTag: string;
  readonly dataBytes: number;
  readonly zeroedBytes: number;
}

/** A running SHA-256, opaque. */
export interface NativeDigest {
  readonly nativeDigest: never;
}

export interface NativeStack {
  readonly nativeStack: never;
}

export type NativeOpenOutcome =
  | { readonly fault: NativeFault }
  | {
      readonly fault: null;
      readonly layers: readonly NativeLayerFacts[];
      readonly virtualBytes: number;
      /** Of the merged index. */
      readonly entries: number;
      readonly packBytes: number;
      readonly stack: NativeStack;
    };

/** Reads the merged content of a packed stack. Any thread, any number of calls at a time. */
export interface NativeStackReader {
  read(into: Uint8Array, offset: number): Promise<NativeFault | null>;
  readNow(into: Uint8Array, offset: number): NativeFault | null;
  readRows(slab: Uint8Array, rows: BigUint64Array): Promise<NativeFault | null>;
  nextRows(
    entry: number,
    sector: number,
    bytesMax: number,
    rowsMax: number,
    withZeroed: boolean,
    /** Also what only a larger layer on top would uncover. */
    pastEnd: boolean,
  ): { readonly rows: BigUint64Array; readonly entry: number; readonly sector: number };
  compare(
    slab: Uint8Array,
    rows: BigUint64Array,
    equal: Uint8Array,
    cancel?: Int32Array,
    cancelIndex?: number,
  ): NativeFault | null;
  writeFlat(slab: Uint8Array, rows: BigUint64Array, fd: number): Promise<NativeFault | null>;
  /** Rows again, of zeroed ones only the parts that lie over this stack's data. */
  keepShadowing(rows: BigUint64Array): BigUint64Array;
  /** Bytes read from files so far, in stored form. */
  fileBytesRead(): number;
  /** Reads content of one layer, CRCs checked. */
  checkBlocks(
    slab: Uint8Array,
    layer: number,
    offset: number,
    length: number,
  ): Promise<NativeFault | null>;
  /** Header and trailer of a compressed layer agree. */
  checkTrailer(layer: number): NativeFault | null;
  /** Adds a part of the file to the digest. */
  hashPart(
    slab: Uint8Array,
    digest: NativeDigest,
    layer: number,
    offset: number,
    length: number,
  ): Promise<NativeFault | null>;
  close(): void;
  isClosed(): boolean;
}

export interface NativeCompressed {
  /** Used in `out`. */
  readonly bytes: number;
  /** Stored length of each block, its CRC included. */
  readonly lengths: Uint32Array;
}

interface NativeLayer {
  readonly LayerSink: new (
    path: string,
    tempPath: string,
    uuid: string,
    parentUuid: string,
    virtualBytes: number,
    codec: NativeCodec,
    blockBytes: number,
    userTag: string,
  ) => NativeLayerSink;
  readonly StackReader: new (pack: Uint8Array, cacheBytes: number) => NativeStackReader;
  openStack(paths: readonly string[]): Promise<NativeOpenOutcome>;
  /** The pack owns the descriptors from then on. */
  fillPack(stack: NativeStack, pack: Uint8Array): Promise<null>;
  /** Null where `out` is too small. */
  compressNow(
    slab: Uint8Array,
    rows: BigUint64Array,
    out: Uint8Array,
    codec: NativeCodec,
    blockBytes: number,
  ): NativeCompressed | null;
  compress(
    slab: Uint8Array,
    rows: BigUint64Array,
    out: Uint8Array,
    codec: NativeCodec,
    blockBytes: number,
  ): Promise<NativeCompressed | null>;
  newDigest(): NativeDigest;
  /** 64 hex digits. Ends the digest. */
  finishDigest(digest: NativeDigest): string;
  compressBound(codec: NativeCodec, blockBytes: number, length: number): number;
}

export const nativeLayer = (): NativeLayer => loadAddon() as NativeLayer;
