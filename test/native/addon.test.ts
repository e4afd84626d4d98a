import { spawn } from 'node:child_process';
import { join } from 'node:path';
import { describe, expect, test } from 'vitest';

import * as guest from '../../src/native/guest.ts';
import { loadAddon, loadNativeFile } from '../../src/native/load.ts';

const root = join(import.meta.dirname, '..', '..');
const addonPath = join(root, 'build', 'Release', 'varve.node');

interface Ended {
  readonly status: number | null;
  readonly signal: NodeJS.Signals | null;
  readonly stderr: string;
  readonly result: Record<string, number | boolean>;
}

/** Runs a scenario of addon-process.mjs in a process of its own, to its end. */
function run(scenario: string): Promise<Ended> {
  const script = join(import.meta.dirname, 'addon-process.mjs');
  const child = spawn(process.execPath, [script, addonPath, scenario]);
  let stdout = '';
  let stderr = '';
  child.stdout.on('data', (text: Buffer) => (stdout += text.toString()));
  child.stderr.on('data', (text: Buffer) => (stderr += text.toString()));
  return new Promise((resolve, reject) => {
    child.once('error', reject);
    child.once('close', (status, signal) => {
      const result = JSON.parse(stdout === '' ? '{}' : stdout) as Ended['result'];
      resolve({ status, signal, stderr, result });
    });
  });
}

const clean = { status: 0, signal: null, stderr: '' };

describe('the addon in threads', { timeout: 180_000 }, () => {
  test('main, eight workers, and a hundred more one after another, without a leak', async () => {
    const ended = await run('recreate');
    expect(ended).toMatchObject({ ...clean, result: { same: true, answers: 108, fds: 0 } });
    expect(ended.result['rssMib']).toBeLessThan(64);
  });

  test('workers alone load and unload it', async () => {
    expect(await run('workersOnly')).toMatchObject(clean);
  });

  test('a worker that is terminated in a read ends with the slice, fifty times', async () => {
    const ended = await run('terminate');
    expect(ended).toMatchObject({ ...clean, result: { same: true, fds: 0 } });
    // A slice is 8 ms; the rest is the thread's own end, on a machine that has other work.
    expect(ended.result['slowestMs']).toBeLessThan(1000);
  });

  test('a process that exits while workers read exits 0, without a signal', async () => {
    expect(await run('exitWhileReading')).toMatchObject(clean);
  });
});

describe('the loader', () => {
  test('one thread loads one addon', () => {
    expect(loadAddon()).toBe(loadAddon());
    expect(loadAddon()).toMatchObject({ abi: { version: 1, rowBytes: 24, regionBytes: 24 } });
  });

  test('a file that is not built is named, with what to do', () => {
    expect(() => loadNativeFile('no-such')).toThrow(/no-such\.node .*npm run native:build/);
  });
});

describe('arguments of a wrong type are TypeErrors, wrong values RangeErrors', () => {
  const bits = new Uint8Array(8);
  const rows = new BigUint64Array(3);
  const cancel = new Int32Array(1);
  const coalesce = {
    bits,
    pageCount: 0,
    fromPage: 0,
    regions: new BigUint64Array(0),
    batchBytes: 4096,
    maxRows: 1,
    maxSegmentBytes: 4096,
    joinGapPages: 0,
  };
  const read = { rows, dest: bits, from: 0, cancel, cancelIndex: 0, enomemDeadlineMs: 0 };
  const pagemap = { pid: process.pid, regions: new BigUint64Array(0), pageCount: 0 } as const;
  const wrong = (value: unknown): never => value as never;

  const typeErrors: Record<string, () => unknown> = {
    'a bitmap that is an array': () => guest.bitmapCount(wrong([1, 2])),
    'a bitmap that is absent': () => guest.bitmapOr(bits, wrong(undefined)),
    'a bitmap of words': () => guest.bitmapAnd(wrong(new Uint32Array(2)), bits),
    'a bitmap that is a buffer without a view': () =>
      guest.bitmapAndNot(wrong(new ArrayBuffer(8)), bits),
    'a bitmap that is a DataView': () => guest.bitmapCount(wrong(new DataView(bits.buffer))),
    'a page that is a string': () => guest.bitmapSetRange(bits, wrong('1'), 1),
    'a count that is a bigint': () => guest.bitmapClearRange(bits, 0, wrong(1n)),
    'regions that are numbers': () => guest.coalesceBatch({ ...coalesce, regions: wrong([0]) }),
    'rows that are signed': () =>
      guest.readProcess({ ...read, pid: 1, rows: wrong(new BigInt64Array(3)) }),
    'a destination that is null': () => guest.readProcess({ ...read, pid: 1, dest: wrong(null) }),
    'a cancel word that is unsigned': () =>
      guest.readFileRows({ ...read, fd: 0, cancel: wrong(new Uint32Array(1)) }),
    'a process that is a string': () => guest.pidfdOpen(wrong('1')),
    'a descriptor that is absent': () => guest.pidfdExited(wrong(undefined)),
    'a socket path that is a number': () => guest.peerCredentials(wrong(7)),
    'a seed that is a string': () => guest.crc32c(bits, wrong('0')),
    'pagemap regions that are absent': () =>
      guest.pagemapScan({ ...pagemap, mode: 'resident', regions: wrong(undefined) }),
  };
  test.each(Object.entries(typeErrors))('%s', (_, call) => {
    expect(call).toThrow(TypeError);
  });

  const rangeErrors: Record<string, () => unknown> = {
    'a page of one half': () => guest.bitmapSetRange(bits, 0.5, 1),
    'a page below zero': () => guest.bitmapSetRange(bits, -1, 1),
    'a page that is NaN': () => guest.bitmapSetRange(bits, NaN, 1),
    'a count past 2^53': () => guest.bitmapSetRange(bits, 0, 2 ** 53),
    'rows that are not threes': () =>
      guest.readProcess({ ...read, pid: 1, rows: new BigUint64Array(4) }),
    'rows longer than the destination': () =>
      guest.readProcess({ ...read, pid: 1, rows: BigUint64Array.of(0n, 0n, 9n) }),
    'rows whose sum wraps': () =>
      guest.readProcess({
        ...read,
        pid: 1,
        rows: BigUint64Array.of(0n, 0n, 2n ** 64n - 1n, 0n, 0n, 2n),
      }),
    'a start past the rows': () => guest.readProcess({ ...read, pid: 1, from: 1 }),
    'a cancel index outside of its words': () =>
      guest.readProcess({ ...read, pid: 1, cancelIndex: 1 }),
    'process 0': () => guest.readProcess({ ...read, pid: 0 }),
    'a descriptor past 2^31': () => guest.closeFd(2 ** 31),
    'a seed past 32 bits': () => guest.crc32c(bits, 2 ** 32),
    'a view of no whole page': () => guest.zeroPages(new Uint8Array(4095)),
    'a batch of no rows': () => guest.coalesceBatch({ ...coalesce, maxRows: 0 }),
  };
  test.each(Object.entries(rangeErrors))('%s', (_, call) => {
    expect(call).toThrow(RangeError);
  });
});
