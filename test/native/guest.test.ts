import { closeSync, ftruncateSync, mkdtempSync, openSync, rmSync, writeSync } from 'node:fs';
import { createServer } from 'node:net';
import { spawn } from 'node:child_process';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, describe, expect, test } from 'vitest';

import * as guest from '../../src/native/guest.ts';

const PAGE = 4096;
const folder = mkdtempSync(join(tmpdir(), 'varve-native-'));
afterAll(() => rmSync(folder, { recursive: true }));

const notCancelled = (): Int32Array => new Int32Array(new SharedArrayBuffer(4));

/** A readable mapping of our own process: the reads below go through the kernel all the same. */
function ownPages(pages: number): { view: Uint8Array; address: bigint } {
  const view = new Uint8Array(new SharedArrayBuffer((pages + 1) * PAGE));
  const skip = Number((BigInt(PAGE) - (guest.viewAddress(view) % BigInt(PAGE))) % BigInt(PAGE));
  const aligned = view.subarray(skip, skip + pages * PAGE);
  return { view: aligned, address: guest.viewAddress(aligned) };
}

function readAll(o: { pid: number; rows: BigUint64Array; dest: Uint8Array }): guest.ReadResult {
  let from = 0;
  for (;;) {
    const result = guest.readProcess({
      ...o,
      from,
      cancel: notCancelled(),
      cancelIndex: 0,
      enomemDeadlineMs: 100,
    });
    if (result.done || result.cancelled || result.error !== 0) return result;
    from = result.bytesDone;
  }
}

describe('bitmaps', () => {
  test('count, or, and, and-not, set and clear agree with a plain array', () => {
    const a = new Uint8Array(16);
    const b = new Uint8Array(16);
    guest.bitmapSetRange(a, 3, 70);
    guest.bitmapSetRange(b, 60, 60);
    guest.bitmapClearRange(b, 64, 1);
    expect(guest.bitmapCount(a)).toBe(70);
    expect(guest.bitmapCount(b)).toBe(59);
    const both = a.slice();
    guest.bitmapAnd(both, b);
    expect(guest.bitmapCount(both)).toBe(12);
    const either = a.slice();
    guest.bitmapOr(either, b);
    expect(guest.bitmapCount(either)).toBe(117);
    guest.bitmapAndNot(either, a);
    expect(guest.bitmapCount(either)).toBe(47);
  });

  test('bitmaps of two lengths and ranges past the end are RangeErrors', () => {
    const bits = new Uint8Array(8);
    expect(() => guest.bitmapOr(bits, new Uint8Array(16))).toThrow(RangeError);
    expect(() => guest.bitmapSetRange(bits, 60, 5)).toThrow(RangeError);
    expect(() => guest.bitmapSetRange(bits, 2 ** 53 - 1, 2 ** 53 - 1)).toThrow(RangeError);
    expect(bits).toEqual(new Uint8Array(8));
  });
});

describe('coalescing', () => {
  const regions = BigUint64Array.of(
    0n,
    65n * 4096n,
    0x1000_0000n,
    65n * 4096n,
    63n * 4096n,
    0x7fff_0000_0000n,
  );
  const options = {
    pageCount: 128,
    fromPage: 0,
    regions,
    batchBytes: 1 << 20,
    maxRows: 1024,
    maxSegmentBytes: 1 << 20,
    joinGapPages: 0,
  };

  test('neighbours merge, and no row crosses a region', () => {
    const bits = new Uint8Array(16);
    guest.bitmapSetRange(bits, 63, 4);
    const batch = guest.coalesceBatch({ ...options, bits });
    expect([...batch.rows]).toEqual([
      0x1000_0000n + 63n * 4096n,
      63n * 4096n,
      2n * 4096n,
      0x7fff_0000_0000n,
      65n * 4096n,
      2n * 4096n,
    ]);
    expect(batch).toMatchObject({ bytes: 4 * PAGE, nextPage: 128 });
  });

  test('batches, row limits and joined gaps', () => {
    const bits = new Uint8Array(16).fill(0x55);
    const small = guest.coalesceBatch({ ...options, bits, batchBytes: 3 * PAGE });
    expect(small).toMatchObject({ bytes: 3 * PAGE, nextPage: 5 });
    const rest = guest.coalesceBatch({ ...options, bits, fromPage: 5, maxRows: 2 });
    expect([...rest.rows.filter((_, i) => i % 3 === 1)]).toEqual([6n * 4096n, 8n * 4096n]);
    const joined = guest.coalesceBatch({ ...options, bits, joinGapPages: 1 });
    expect(joined.rows.length / 3).toBe(2);
    expect(joined.bytes).toBe(127 * PAGE - PAGE);
  });

  test('a bitmap or layout that does not fit is refused', () => {
    const bits = new Uint8Array(16);
    const short = new Uint8Array(8);
    expect(() => guest.coalesceBatch({ ...options, bits: short })).toThrow(RangeError);
    const tail = new Uint8Array(24);
    tail[16] = 2;
    const odd = { ...options, pageCount: 129, bits: tail };
    expect(() => guest.coalesceBatch(odd)).toThrow(/past pageCount/);
    expect(() => guest.coalesceBatch({ ...options, bits, pageCount: 127 })).toThrow(RangeError);
    expect(() => guest.coalesceBatch({ ...options, bits, batchBytes: 5000 })).toThrow(RangeError);
    const gap = regions.slice();
    gap[3] = 66n * 4096n;
    expect(() => guest.coalesceBatch({ ...options, bits, regions: gap })).toThrow(RangeError);
  });
});

describe('reads', () => {
  test.each([1023, 1024, 1025, 2048])('%i single-page rows arrive packed', (count) => {
    const { view, address } = ownPages(count * 2);
    const rows = new BigUint64Array(count * 3);
    for (let i = 0; i < count; i++) {
      view.fill(1 + (i % 255), i * 2 * PAGE, (i * 2 + 1) * PAGE);
      const offset = BigInt(i * 2 * PAGE);
      rows.set([address + offset, offset, 4096n], i * 3);
    }
    const dest = new Uint8Array(new SharedArrayBuffer(count * PAGE));
    const result = readAll({ pid: process.pid, rows, dest });
    expect(result).toMatchObject({ done: true, error: 0, bytesDone: count * PAGE });
    for (let i = 0; i < count; i++) {
      expect(dest[i * PAGE]).toBe(1 + (i % 255));
      expect(dest[(i + 1) * PAGE - 1]).toBe(1 + (i % 255));
    }
  });

  test('a page that is not mapped fails with EFAULT and its address', () => {
    const rows = BigUint64Array.of(4096n, 0n, 4096n);
    const dest = new Uint8Array(PAGE);
    const result = readAll({ pid: process.pid, rows, dest });
    expect(result).toMatchObject({ done: false, bytesDone: 0, address: 4096n });
    expect(guest.errnoName(result.error)).toBe('EFAULT');
  });

  test('a set cancel word stops before the first system call', () => {
    const { address } = ownPages(1);
    const cancel = notCancelled();
    Atomics.store(cancel, 0, 1);
    const result = guest.readProcess({
      pid: process.pid,
      rows: BigUint64Array.of(address, 0n, 4096n),
      dest: new Uint8Array(PAGE),
      from: 0,
      cancel,
      cancelIndex: 0,
      enomemDeadlineMs: 0,
    });
    expect(result).toMatchObject({ cancelled: true, done: false, syscalls: 0, error: 0 });
  });

  test('a file is read at image offsets, and its end inside a row is ENODATA', () => {
    const fd = openSync(join(folder, 'memory'), 'w+');
    try {
      ftruncateSync(fd, 4 * PAGE);
      writeSync(fd, Buffer.alloc(PAGE, 7), 0, PAGE, 2 * PAGE);
      const rows = BigUint64Array.of(0n, 8192n, 4096n, 0n, 12288n, 4096n);
      const dest = new Uint8Array(2 * PAGE).fill(1);
      const shared = { fd, from: 0, cancel: notCancelled(), cancelIndex: 0, enomemDeadlineMs: 0 };
      expect(guest.readFileRows({ ...shared, rows, dest })).toMatchObject({ done: true });
      expect(dest.subarray(0, PAGE).every((byte) => byte === 7)).toBe(true);
      expect(dest.subarray(PAGE).every((byte) => byte === 0)).toBe(true);
      ftruncateSync(fd, 3 * PAGE);
      const cut = guest.readFileRows({ ...shared, rows, dest });
      expect(cut).toMatchObject({ bytesDone: PAGE, address: 12288n });
      expect(guest.errnoName(cut.error)).toBe('ENODATA');
    } finally {
      closeSync(fd);
    }
  });
});

describe('scans', () => {
  test.each(['best', 'portable', 'avx2', 'avx512'] as const)('zero pages, %s vectors', (level) => {
    const view = new Uint8Array(130 * PAGE);
    view[0] = 1;
    view[65 * PAGE + 4095] = 128;
    view[129 * PAGE + 2048] = 1;
    let bits: Uint8Array;
    try {
      bits = guest.zeroPages(view, level);
    } catch (error) {
      expect(error).toBeInstanceOf(RangeError); // this processor has no such vectors
      return;
    }
    expect(bits.length).toBe(24);
    expect(guest.bitmapCount(bits)).toBe(127);
    for (const page of [0, 65, 129]) expect((bits[page >> 3] ?? 0) & (1 << (page & 7))).toBe(0);
  });

  test('checksums of the format notes', () => {
    const digits = Buffer.from('123456789');
    expect(guest.crc32c(digits, 0)).toBe(0x58e3fa20);
    expect(guest.crc32c(digits, 100007)).toBe(0x3c9bd4e0);
    expect(guest.crc32c(digits.subarray(4), guest.crc32c(digits.subarray(0, 4), 0))).toBe(
      0x58e3fa20,
    );
  });

  test('extents of a sparse file', () => {
    const fd = openSync(join(folder, 'sparse'), 'w+');
    try {
      ftruncateSync(fd, 1000 * PAGE);
      writeSync(fd, Buffer.alloc(PAGE, 1), 0, PAGE, 10 * PAGE);
      writeSync(fd, Buffer.alloc(2 * PAGE, 1), 0, 2 * PAGE, 998 * PAGE);
      const { bits, error } = guest.fileExtents(fd, 1000);
      expect(error).toBe(0);
      const expected = new Uint8Array(bits.length);
      guest.bitmapSetRange(expected, 10, 1);
      guest.bitmapSetRange(expected, 998, 2);
      expect(bits).toEqual(expected);
    } finally {
      closeSync(fd);
    }
  });

  test('many small extents are found in turns, and an abort ends the search', async () => {
    const pages = 20_000;
    const fd = openSync(join(folder, 'fragments'), 'w+');
    try {
      ftruncateSync(fd, pages * PAGE);
      const page = Buffer.alloc(PAGE, 1);
      for (let i = 0; i < pages; i += 4) writeSync(fd, page, 0, PAGE, i * PAGE);
      const sliced = await guest.fileExtentsInTurns(fd, pages, new AbortController().signal);
      expect(guest.bitmapCount(sliced.bits)).toBe(pages / 4);
      expect(sliced).toEqual(guest.fileExtents(fd, pages));
      const aborted = AbortSignal.abort(new Error('enough'));
      await expect(guest.fileExtentsInTurns(fd, pages, aborted)).rejects.toThrow('enough');
    } finally {
      closeSync(fd);
    }
  });

  test('the ioctl and the file of pagemap name the same pages', () => {
    const { view, address } = ownPages(300);
    view[3 * PAGE] = 1;
    view.fill(1, 100 * PAGE, 110 * PAGE);
    const regions = BigUint64Array.of(0n, 300n * 4096n, address);
    const options = { pid: process.pid, regions, pageCount: 300, mode: 'private' } as const;
    const scan = guest.pagemapScan(options);
    const pread = guest.pagemapScan({ ...options, method: 'pread' });
    expect(pread).toMatchObject({ error: 0, method: 'pread' });
    expect(scan.bits).toEqual(pread.bits);
    expect(guest.bitmapCount(scan.bits)).toBeGreaterThanOrEqual(11);
  });
});

describe('processes', () => {
  test('the listener of a socket is named by the kernel', async () => {
    const path = join(folder, 'api.sock');
    const server = createServer((socket) => socket.destroy());
    await new Promise<void>((resolve) => server.listen(path, resolve));
    expect(guest.peerCredentials(path)).toEqual({
      pid: process.pid,
      uid: process.getuid?.(),
      gid: process.getgid?.(),
      error: 0,
    });
    await new Promise((resolve) => server.close(resolve));
    expect(guest.errnoName(guest.peerCredentials(path).error)).toBe('ENOENT');
    const long = join(folder, 'x'.repeat(120));
    expect(guest.errnoName(guest.peerCredentials(long).error)).toBe('ENAMETOOLONG');
  });

  test('a pidfd tells when its process has exited; its number is then nobody', async () => {
    const child = spawn('sleep', ['60']);
    const pid = child.pid ?? 0;
    const { fd, error } = guest.pidfdOpen(pid);
    expect(error).toBe(0);
    expect(guest.processStartTime(pid).ticks).toBeGreaterThan(0n);
    expect(guest.pidfdExited(fd)).toBe(false);
    const exited = new Promise((resolve) => child.once('exit', resolve));
    child.kill('SIGKILL');
    await exited;
    expect(guest.pidfdExited(fd)).toBe(true);
    guest.closeFd(fd);
    expect(guest.errnoName(guest.pidfdOpen(pid).error)).toBe('ESRCH');
    expect(guest.errnoName(guest.processStartTime(pid).error)).toBe('ESRCH');
    const rows = BigUint64Array.of(4096n, 0n, 4096n);
    const read = readAll({ pid, rows, dest: new Uint8Array(PAGE) });
    expect(guest.errnoName(read.error)).toBe('ESRCH');
  });

  test('touching memory keeps its contents', () => {
    const view = new Uint8Array(new SharedArrayBuffer(40 << 20));
    view[0] = 5;
    view[(20 << 20) + 1] = 6;
    guest.prefault(view);
    expect([view[0], view[(20 << 20) + 1], view[view.length - 1]]).toEqual([5, 6, 0]);
  });
});
