import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, describe, expect, test } from 'vitest';
import { Failure } from '../../src/result.ts';
import { allCases } from '../../src/selftest/cases.ts';
import { compareMemory } from '../../src/selftest/compare.ts';
import {
  GuestLines,
  guestKernelPath,
  kernelCommandLine,
  parseRound,
} from '../../src/selftest/guest.ts';
import { selftestHead, selftestRows } from '../../src/selftest/report.ts';
import { isFine } from '../../src/selftest/run.ts';
import { runCase, type CaseOutcome } from '../../src/selftest/run-case.ts';
import { openSelftestDaemon } from '../../src/cli/selftest.ts';
import { PAGE_BYTES } from '../../src/units.ts';
import { varve } from '../cli/run.ts';

const never = new AbortController().signal;
const folder = mkdtempSync(join(tmpdir(), 'varve-guest-'));
afterAll(() => {
  rmSync(folder, { recursive: true });
});

describe('the bare guest', () => {
  test('is a small 64-bit program that is loaded where it is linked, above 1 MiB', () => {
    const image = readFileSync(guestKernelPath());
    expect(image.length).toBeLessThan(16 * 1024);
    expect(image.subarray(0, 5)).toEqual(Buffer.from([0x7f, 0x45, 0x4c, 0x46, 2]));
    const header = Number(image.readBigUInt64LE(32));
    const [virtual, physical] = [16, 24].map((at) => image.readBigUInt64LE(header + at));
    expect(physical).toBe(virtual);
    expect(physical).toBeGreaterThanOrEqual(2n ** 20n);
    expect(image.readBigUInt64LE(24)).toBe(physical);
  });

  test('is told its settings in words that it knows', () => {
    const text = kernelCommandLine({
      pages: 5,
      first: 9,
      pauseMs: 20,
      seed: 3,
      ranges: [{ start: 2 ** 32, end: 2 ** 32 + 8192 }],
    });
    expect(text).toBe(
      'varve.pages=5 varve.first=9 varve.pause=20 varve.seed=3 varve.range=0x100000000-0x100002000',
    );
    const source = readFileSync(join(import.meta.dirname, '../../native/guest/guest.c'), 'utf8');
    for (const word of text.split(' ')) {
      expect(source).toContain(`"${word.slice('varve.'.length).split('=')[0] ?? ''}="`);
    }
  });

  test("is heard through a VMM's own lines", () => {
    expect(parseRound('round=7 wrote=256 bad=1 longest_us=4087\r')).toEqual({
      round: 7,
      wrotePages: 256,
      badPages: 1,
      longestUs: 4087,
    });
    expect(parseRound('2026-01-01 [anonymous-instance:main] Running Firecracker')).toBeUndefined();
    expect(parseRound('varve guest ticks_per_ms=2446422 pages=64512')).toBeUndefined();
  });
});

describe('waiting for rounds', () => {
  const line = (round: number, bad = 0) => `round=${round} wrote=1 bad=${bad} longest_us=${round}`;

  test('counts from the line that was last, and adds up what is bad', async () => {
    const lines = new GuestLines();
    lines.take(line(4, 2));
    const waiting = lines.more(2, never);
    lines.take(line(5));
    lines.take(line(6, 1));
    expect((await waiting).round).toBe(6);
    expect(lines.badPages).toBe(3);
    expect(lines.takeLongestUs()).toBe(6);
    expect(lines.takeLongestUs()).toBe(0);
  });

  test('counts the first line of a restored guest, wherever it goes on', async () => {
    const lines = new GuestLines();
    const waiting = lines.more(1, never);
    lines.take(line(900));
    expect((await waiting).round).toBe(900);
  });

  test('ends with the reason of its signal', async () => {
    const controller = new AbortController();
    const waiting = new GuestLines().more(1, controller.signal);
    controller.abort(new Error('the VMM ended'));
    await expect(waiting).rejects.toThrow('the VMM ended');
  });
});

describe('two memory files', () => {
  const write = (name: string, pages: readonly number[]): string => {
    const path = join(folder, name);
    writeFileSync(path, Buffer.concat(pages.map((value) => Buffer.alloc(PAGE_BYTES, value))));
    return path;
  };

  test('are compared page by page, to the end of the longer one', async () => {
    const one = write('one', [0, 1, 2, 3]);
    expect(await compareMemory(one, write('same', [0, 1, 2, 3]), never)).toEqual({
      pages: 4,
      differing: 0,
      firstDiffering: null,
    });
    expect(await compareMemory(one, write('other', [0, 1, 9, 3]), never)).toEqual({
      pages: 4,
      differing: 1,
      firstDiffering: 2,
    });
    expect(await compareMemory(write('short', [0, 1]), one, never)).toEqual({
      pages: 4,
      differing: 2,
      firstDiffering: 2,
    });
  });
});

describe('the table', () => {
  const outcome = (verdict: CaseOutcome['verdict']): CaseOutcome => ({
    name: verdict,
    verdict,
    reason: verdict === 'exact' ? null : { kind: 'some-kind', message: 'the reason' },
    captures: [],
    seconds: 1,
  });

  test('says of each case what happened, and only differences and failures are wrong', () => {
    const all = (['exact', 'refused', 'skipped', 'differs', 'failed'] as const).map(outcome);
    const rows = selftestRows({ binary: '/vmm', version: 'v1', cases: all });
    for (const row of rows) expect(row).toHaveLength(selftestHead.length);
    expect(rows.map((row) => row.at(-1))).toEqual([
      'exact',
      'refused (some-kind)',
      'not tried: the reason',
      'DIFFERS: the reason',
      'FAILED: some-kind: the reason',
    ]);
    expect(all.map(isFine)).toEqual([true, true, true, false, false]);
  });
});

describe('a VMM that is none', () => {
  test('that ends at once fails its case, which leaves nothing behind', async () => {
    const [first] = allCases({ memoryMib: 256, twoRegions: false });
    if (first === undefined) throw new Error('there are cases');
    const own = join(folder, 'c');
    const ended = await runCase(
      first,
      {
        binary: '/bin/false',
        folder: own,
        openDaemon: openSelftestDaemon,
        onStep: () => undefined,
      },
      never,
    );
    expect(ended).toMatchObject({ verdict: 'failed', reason: { kind: 'vmm-ended' } });
    expect(() => readFileSync(own)).toThrow('ENOENT');
  });

  test('a stopped case rejects with what stopped it', async () => {
    const [first] = allCases({ memoryMib: 256, twoRegions: false });
    if (first === undefined) throw new Error('there are cases');
    const reason = new Failure({ kind: 'stopped', message: 'stopped by SIGTERM' });
    const deps = {
      binary: '/bin/false',
      folder: join(folder, 's'),
      openDaemon: openSelftestDaemon,
      onStep: () => undefined,
    };
    await expect(runCase(first, deps, AbortSignal.abort(reason))).rejects.toBe(reason);
    expect(() => readFileSync(deps.folder)).toThrow('ENOENT');
  });

  test('is named by the command before any case', async () => {
    const ran = await varve(['--json', 'selftest', '--firecracker', '/no/such/vmm']);
    expect(ran.code).toBe(1);
    expect(ran.stdout).toBe('');
    expect(JSON.parse(ran.stderr)).toMatchObject({ error: { kind: 'vmm-not-started' } });
  });
});
