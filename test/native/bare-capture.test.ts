import { execFileSync, spawnSync } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';

import * as guest from '../../src/native/guest.ts';

const PAGE = 4096;
const bench = join(import.meta.dirname, '..', '..', 'native', 'bench');
const program = join(bench, 'out', 'bare_capture');
const folder = mkdtempSync(join(tmpdir(), 'varve-bare-'));
const rangesPath = join(folder, 'ranges');
const outPath = join(folder, 'out');

/** Memory of this very process, which the program reads from outside; every other page of it. */
const memory = new Uint8Array(new SharedArrayBuffer(5000 * PAGE));
const rangeCount = 2500;
const expected = new Uint8Array(rangeCount * PAGE);

beforeAll(() => {
  execFileSync('make', ['-s', '-C', bench, 'out/bare_capture']);
  const address = guest.viewAddress(memory);
  const ranges = new BigUint64Array(rangeCount * 2);
  for (let i = 0; i < memory.length; i += 97) memory[i] = i % 251;
  for (let i = 0; i < rangeCount; i++) {
    ranges.set([address + BigInt(i * 2 * PAGE), BigInt(PAGE)], i * 2);
    expected.set(memory.subarray(i * 2 * PAGE, (i * 2 + 1) * PAGE), i * PAGE);
  }
  writeFileSync(rangesPath, ranges);
});
afterAll(() => rmSync(folder, { recursive: true }));

const sum = (bytes: Uint8Array): string => {
  let total = 0n;
  for (const word of new BigUint64Array(bytes.buffer)) total += word;
  return BigInt.asUintN(64, total).toString(16).padStart(16, '0');
};

function run(mode: string, ...more: string[]): Record<string, unknown> {
  const args = ['--pid', String(process.pid), '--ranges', rangesPath, '--mode', mode, ...more];
  return JSON.parse(execFileSync(program, args).toString()) as Record<string, unknown>;
}

describe('the opponent of the benches', () => {
  test('reads all ranges, 1024 a call, and says what it read', () => {
    const answer = run('readv', '--threads', '2', '--batch-bytes', String(8 << 20));
    const facts = { bytes: expected.length, checksum: sum(expected), batches: 3, syscalls: 3 };
    expect(answer).toMatchObject(facts);
  });

  test('captures the same bytes into a file', () => {
    const answer = run('capture', '--threads', '3', '--batch-bytes', '12288', '--out', outPath);
    expect(answer).toMatchObject({ bytes: expected.length, checksum: sum(expected) });
    expect(readFileSync(outPath).equals(expected)).toBe(true);
  });

  test('a range that cannot be read ends it with the reason', () => {
    writeFileSync(rangesPath, BigUint64Array.of(4096n, 4096n));
    const args = ['--pid', String(process.pid), '--ranges', rangesPath];
    const ended = spawnSync(program, args);
    expect(ended.status).toBe(1);
    expect(ended.stderr.toString()).toMatch(/process_vm_readv: Bad address/);
  });
});
