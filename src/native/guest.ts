/**
 * The guest face of the addon: bitmaps, reads of guest memory, and who a process is. Everything is
 * synchronous. Wrong types throw TypeError, wrong values RangeError; what the kernel refuses comes
 * back as `error`, an errno (0 = none), for {@link errnoName}.
 */
import { setImmediate } from 'node:timers/promises';
import { getSystemErrorName } from 'node:util';

import { PAGE_BYTES } from '../units.ts';
import { loadAddon } from './load.ts';

/** Columns of a row: host address, image offset, length; all bytes. */
export const ROW_COLUMNS = 3;
/** Columns of a region: image offset, length, host address; all bytes. Not the order of rows. */
export const REGION_COLUMNS = 3;

interface NativeRead extends ReadResult {
  readonly stalledNs: number;
}
type NativeReadFunction = (
  source: number,
  rows: BigUint64Array,
  dest: Uint8Array,
  from: number,
  cancel: Int32Array,
  cancelIndex: number,
  stalledNs: number,
  enomemDeadlineMs: number,
  callBytesMax: number,
) => NativeRead;

interface GuestAddon {
  bitmapCount(bits: Uint8Array): number;
  bitmapOr(into: Uint8Array, from: Uint8Array): void;
  bitmapAnd(into: Uint8Array, from: Uint8Array): void;
  bitmapAndNot(into: Uint8Array, from: Uint8Array): void;
  bitmapSetRange(bits: Uint8Array, firstPage: number, pageCount: number): void;
  bitmapClearRange(bits: Uint8Array, firstPage: number, pageCount: number): void;
  coalesceBatch(
    bits: Uint8Array,
    pageCount: number,
    regions: BigUint64Array,
    fromPage: number,
    batchBytes: number,
    maxRows: number,
    maxSegmentBytes: number,
    joinGapPages: number,
  ): CoalescedBatch;
  readProcess: NativeReadFunction;
  readFileRows: NativeReadFunction;
  zeroPages(view: Uint8Array, bits: Uint8Array, level: number): void;
  crc32c(view: Uint8Array, seed: number): number;
  adviseHugePages(view: Uint8Array): void;
  touchPages(view: Uint8Array): void;
  viewAddress(view: Uint8Array): bigint;
  fileExtents(
    fd: number,
    from: number,
    pageCount: number,
    bits: Uint8Array,
  ): { readonly next: number; readonly done: boolean; readonly error: number };
  pagemapScan(
    pid: number,
    regions: BigUint64Array,
    pageCount: number,
    fromPage: number,
    mode: number,
    bits: Uint8Array,
    forcePread: number,
  ): {
    readonly next: number;
    readonly done: boolean;
    readonly error: number;
    readonly scan: boolean;
  };
  peerCredentials(socketPath: string): PeerCredentials;
  pidfdOpen(pid: number): { fd: number; error: number };
  pidfdExited(fd: number): boolean;
  closeFd(fd: number): void;
  processStartTime(pid: number): { ticks: bigint; error: number };
}

const addon = (): GuestAddon => loadAddon() as GuestAddon;

/** Name of an errno that a function here returned, such as `EFAULT`. */
export const errnoName = (error: number): string => getSystemErrorName(-error);

/** Bytes of a bitmap of `pageCount` pages: one bit a page, in whole 64-bit words. */
export const bitmapBytes = (pageCount: number): number => Math.ceil(pageCount / 64) * 8;

/** How many bits are set. */
export const bitmapCount = (bits: Uint8Array): number => addon().bitmapCount(bits);
/** `into |= from`. One length, or RangeError. */
export const bitmapOr = (into: Uint8Array, from: Uint8Array): void => addon().bitmapOr(into, from);
/** `into &= ~from`. One length, or RangeError. */
export const bitmapAndNot = (into: Uint8Array, from: Uint8Array): void =>
  addon().bitmapAndNot(into, from);
/** `into &= from`. One length, or RangeError. */
export const bitmapAnd = (into: Uint8Array, from: Uint8Array): void =>
  addon().bitmapAnd(into, from);
/** Sets `pageCount` bits from `firstPage` on; outside of `bits`: RangeError, nothing set. */
export const bitmapSetRange = (bits: Uint8Array, firstPage: number, pageCount: number): void =>
  addon().bitmapSetRange(bits, firstPage, pageCount);
/** Clears `pageCount` bits from `firstPage` on; outside of `bits`: RangeError, nothing cleared. */
export const bitmapClearRange = (bits: Uint8Array, firstPage: number, pageCount: number): void =>
  addon().bitmapClearRange(bits, firstPage, pageCount);

export interface CoalesceOptions {
  /** One bit a page, in whole 64-bit words; no bit set past `pageCount`, or RangeError. */
  readonly bits: Uint8Array;
  readonly pageCount: number;
  /** Where to go on: 0, then the `nextPage` of the batch before. */
  readonly fromPage: number;
  /** Rows of {@link REGION_COLUMNS}: ascending, adjacent, `pageCount` pages in all; RangeError. */
  readonly regions: BigUint64Array;
  /** Most bytes of one batch; whole pages. */
  readonly batchBytes: number;
  /** Most rows of one batch. */
  readonly maxRows: number;
  /** Most bytes of one row; whole pages. */
  readonly maxSegmentBytes: number;
  /** Clean pages that two runs may be joined across; the clean pages are then in the row too. */
  readonly joinGapPages: number;
}

export interface CoalescedBatch {
  /** Rows of {@link ROW_COLUMNS}, ascending in image offset; none crosses a region. */
  readonly rows: BigUint64Array;
  /** Sum of the rows' lengths. */
  readonly bytes: number;
  /** Where to go on; `pageCount` at the end. */
  readonly nextPage: number;
}

/** The next batch of ranges to read, from the set bits at or after `fromPage`. */
export const coalesceBatch = (o: CoalesceOptions): CoalescedBatch =>
  addon().coalesceBatch(
    o.bits,
    o.pageCount,
    o.regions,
    o.fromPage,
    o.batchBytes,
    o.maxRows,
    o.maxSegmentBytes,
    o.joinGapPages,
  );

interface ReadOptions {
  /** Rows of {@link ROW_COLUMNS}. */
  readonly rows: BigUint64Array;
  /** The rows' bytes go here, packed one after another; shorter than the rows: RangeError. */
  readonly dest: Uint8Array;
  /** `bytesDone` of the call before; 0 to begin. */
  readonly from: number;
  /** `cancel[cancelIndex]` other than 0 stops the read; polled between system calls. */
  readonly cancel: Int32Array;
  readonly cancelIndex: number;
  /** How long ENOMEM may last, in milliseconds, without one byte read, before it is the error. */
  readonly enomemDeadlineMs: number;
  /** Most bytes asked of one system call; 8 MiB where absent. */
  readonly callBytesMax?: number;
}
export interface ReadProcessOptions extends ReadOptions {
  readonly pid: number;
}
export interface ReadFileOptions extends ReadOptions {
  readonly fd: number;
}

export interface ReadResult {
  /** Bytes of all rows that are in `dest` now, earlier calls included. */
  readonly bytesDone: number;
  /** Every row is read. False without error or cancel: the slice is over, call again. */
  readonly done: boolean;
  readonly cancelled: boolean;
  /** errno, 0 = none. Of a process: EFAULT, ESRCH (gone), EPERM, ENOSYS, ENOMEM. */
  readonly error: number;
  /** With EFAULT the page that cannot be read; of a file the offset of the failure. Else 0. */
  readonly address: bigint;
  /** System calls made by this call. */
  readonly syscalls: number;
}

const CALL_BYTES_MAX = 8 * 1024 * 1024;

/**
 * Runs one slice; goes on while ENOMEM stands in the way, so that its deadline holds over slices.
 * The loop is here, not in the addon, so that a worker's termination can cut it between slices.
 */
function readSlice(read: NativeReadFunction, source: number, o: ReadOptions): ReadResult {
  let syscalls = 0;
  let stalledNs = 0;
  for (;;) {
    const { stalledNs: stalled, ...result } = read(
      source,
      o.rows,
      o.dest,
      o.from,
      o.cancel,
      o.cancelIndex,
      stalledNs,
      o.enomemDeadlineMs,
      o.callBytesMax ?? CALL_BYTES_MAX,
    );
    syscalls += result.syscalls;
    stalledNs = stalled;
    const ended = result.done || result.cancelled || result.error !== 0;
    if (ended || stalled === 0 || result.bytesDone > o.from) return { ...result, syscalls };
  }
}

/**
 * process_vm_readv of all rows. Works about 8 ms, then returns with `done` false: call again with
 * `from` = `bytesDone`. Short reads go on where they ended, EINTR and EAGAIN are retried.
 */
export const readProcess = (o: ReadProcessOptions): ReadResult =>
  readSlice(addon().readProcess, o.pid, o);

/**
 * The same from a file, at the rows' image offsets (pread). The end of the file inside a row is
 * ENODATA.
 */
export const readFileRows = (o: ReadFileOptions): ReadResult =>
  readSlice(addon().readFileRows, o.fd, o);

/** `best` is the widest the processor has; naming one it lacks is a RangeError. */
export type SimdLevel = 'best' | 'portable' | 'avx2' | 'avx512';
const simdLevels: readonly SimdLevel[] = ['best', 'portable', 'avx2', 'avx512'];
/** Bytes one native scan or checksum call gets: a millisecond or two at memory speed. */
const SCAN_SLICE_BYTES = 16 * 1024 * 1024;

/**
 * Which 4 KiB pages of `view` are all zero: bit i is page i, in whole 64-bit words. `view` is whole
 * pages, or RangeError.
 */
export function zeroPages(view: Uint8Array, level: SimdLevel = 'best'): Uint8Array {
  const native = addon();
  const bits = new Uint8Array(bitmapBytes(Math.ceil(view.length / PAGE_BYTES)));
  const levelIndex = simdLevels.indexOf(level);
  if (view.length <= SCAN_SLICE_BYTES) {
    native.zeroPages(view, bits, levelIndex);
    return bits;
  }
  for (let at = 0; at < view.length; at += SCAN_SLICE_BYTES) {
    const slice = view.subarray(at, at + SCAN_SLICE_BYTES);
    const firstByte = at / PAGE_BYTES / 8;
    const endByte = firstByte + bitmapBytes(Math.ceil(slice.length / PAGE_BYTES));
    native.zeroPages(slice, bits.subarray(firstByte, endByte), levelIndex);
  }
  return bits;
}

/**
 * CRC-32C without initial or final inversion, as ZFile has it: `crc32c(b, crc32c(a, s))` is that of
 * a then b. Source: FORMAT.md §2.
 */
export function crc32c(view: Uint8Array, seed: number): number {
  const native = addon();
  if (view.length <= SCAN_SLICE_BYTES) return native.crc32c(view, seed);
  let crc = seed;
  for (let at = 0; at < view.length; at += SCAN_SLICE_BYTES) {
    crc = native.crc32c(view.subarray(at, at + SCAN_SLICE_BYTES), crc);
  }
  return crc;
}

/**
 * Data extents of a sparse file as a page bitmap: a hole is 0, a page that data touches 1. Extents
 * are as fine as the file system's blocks. Moves the descriptor's own file offset.
 */
export function fileExtents(fd: number, pageCount: number): FileExtents {
  const steps = extentSteps(fd, pageCount);
  for (;;) {
    const step = steps.next();
    if (step.done === true) return step.value;
  }
}

/**
 * The same, giving the event loop a turn after each slice of about 8 ms: a file of many small
 * extents takes a second or more.
 */
export async function fileExtentsInTurns(
  fd: number,
  pageCount: number,
  signal: AbortSignal,
): Promise<FileExtents> {
  const steps = extentSteps(fd, pageCount);
  for (;;) {
    signal.throwIfAborted();
    const step = steps.next();
    if (step.done === true) return step.value;
    await setImmediate();
  }
}

export interface FileExtents {
  readonly bits: Uint8Array;
  readonly error: number;
}

function* extentSteps(fd: number, pageCount: number): Generator<void, FileExtents> {
  const native = addon();
  const bits = new Uint8Array(bitmapBytes(pageCount));
  let from = 0;
  for (;;) {
    const { next, done, error } = native.fileExtents(fd, from, pageCount, bits);
    if (done) return { bits, error };
    from = next;
    yield;
  }
}

export type PagemapMode = 'resident' | 'private' | 'zero';
const pagemapModes: readonly PagemapMode[] = ['resident', 'private', 'zero'];

export interface PagemapOptions {
  readonly pid: number;
  /** Rows of {@link REGION_COLUMNS}: ascending, adjacent, `pageCount` pages in all; RangeError. */
  readonly regions: BigUint64Array;
  readonly pageCount: number;
  /**
   * `resident`: present or swapped. `private`: that, and not file-backed. `zero`: the kernel's zero
   * page is mapped there (read, never written); nothing where the method is `pread`.
   */
  readonly mode: PagemapMode;
  /** Which way to ask; `auto` takes the ioctl where the kernel has it (6.7). */
  readonly method?: 'auto' | 'pread';
}

/** Pages of a process that match the mode. Unmapped ones match nothing. */
export function pagemapScan(o: PagemapOptions): {
  bits: Uint8Array;
  error: number;
  method: 'scan' | 'pread';
} {
  const native = addon();
  const bits = new Uint8Array(bitmapBytes(o.pageCount));
  const mode = pagemapModes.indexOf(o.mode);
  const force = o.method === 'pread' ? 1 : 0;
  let from = 0;
  for (;;) {
    const step = native.pagemapScan(o.pid, o.regions, o.pageCount, from, mode, bits, force);
    if (step.done || step.error !== 0) {
      return { bits, error: step.error, method: step.scan ? 'scan' : 'pread' };
    }
    from = step.next;
  }
}

export interface PeerCredentials {
  readonly pid: number;
  readonly uid: number;
  readonly gid: number;
  readonly error: number;
}

/** Longest wait for room in a socket's backlog. */
const BACKLOG_WAIT_MS = 1000;
const EAGAIN = 11;

/**
 * Who listens on a Unix socket (SO_PEERCRED): connects, asks, closes. The answer is the process
 * that called listen(2). A backlog that stays full for a second is EAGAIN.
 */
export function peerCredentials(socketPath: string): PeerCredentials {
  const native = addon();
  const end = performance.now() + BACKLOG_WAIT_MS;
  for (;;) {
    const credentials = native.peerCredentials(socketPath);
    if (credentials.error !== EAGAIN || performance.now() >= end) return credentials;
  }
}

/** A descriptor that stands for this process and no later one of its number; `fd` -1 on error. */
export const pidfdOpen = (pid: number): { fd: number; error: number } => addon().pidfdOpen(pid);
/** Whether the process of a pidfd has exited; a zombie has. */
export const pidfdExited = (fd: number): boolean => addon().pidfdExited(fd);
/** Closes a descriptor that a function here returned. */
export const closeFd = (fd: number): void => addon().closeFd(fd);
/** When a process started, in clock ticks after boot (/proc/pid/stat field 22); ESRCH if none. */
export const processStartTime = (pid: number): { ticks: bigint; error: number } =>
  addon().processStartTime(pid);

/** Bytes one native touch call gets: zeroing them takes a few milliseconds. */
const TOUCH_SLICE_BYTES = 16 * 1024 * 1024;

/**
 * Makes every page of a view present and writable before it is needed, in huge pages where the
 * kernel gives them. Keeps the contents.
 */
export function prefault(view: Uint8Array): void {
  const native = addon();
  native.adviseHugePages(view);
  for (let at = 0; at < view.length; at += TOUCH_SLICE_BYTES) {
    native.touchPages(view.subarray(at, at + TOUCH_SLICE_BYTES));
  }
}

/**
 * Address of a view's first byte. Large SharedArrayBuffers start 16 bytes into a page; an arena
 * that wants its slabs on pages skips the difference.
 */
export const viewAddress = (view: Uint8Array): bigint => addon().viewAddress(view);
