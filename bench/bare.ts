/**
 * The opponent: a C program that does the bare system calls on the same ranges of the same process.
 */
import { execFileSync } from 'node:child_process';
import { rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import type { MiniVm } from '../src/minivm/launch.ts';
import { projectRoot } from './daemon.ts';

export interface BareResult {
  readonly seconds: number;
  readonly bytes: number;
  readonly checksum: string;
  /** Mode `freeze`: the part of it spent waiting for the VMM's answers. */
  readonly answer_seconds: number;
}

/** Ranges of the pages set in a bitmap of image pages, as host addresses. */
export async function rangesOf(vm: MiniVm, pages: BigUint64Array): Promise<BigUint64Array> {
  const { regions } = await vm.info();
  const rows: bigint[] = [];
  const bits = new Uint8Array(pages.buffer, pages.byteOffset, pages.byteLength);
  const has = (page: number): boolean => (((bits[page >> 3] ?? 0) >> (page & 7)) & 1) === 1;
  for (const region of regions) {
    const first = region.imageOffset / 4096;
    const count = region.bytes / 4096;
    for (let page = 0; page < count;) {
      if (!has(first + page)) {
        page++;
        continue;
      }
      let end = page;
      while (end < count && has(first + end)) end++;
      rows.push(BigInt(region.hostAddress) + BigInt(page) * 4096n, BigInt(end - page) * 4096n);
      page = end;
    }
  }
  return BigUint64Array.from(rows);
}

export interface BareOptions {
  readonly pid: number;
  readonly ranges: BigUint64Array;
  readonly mode: 'readv' | 'capture' | 'freeze';
  readonly threads: number;
  readonly folder: string;
  /** Mode `freeze`: the VMM's API socket. */
  readonly socketPath?: string;
}

/** One run. The output file is on the daemon's filesystem, and removed. */
export function runBare(options: BareOptions): BareResult {
  const file = join(options.folder, 'ranges.bin');
  const out = join(options.folder, 'bare.out');
  writeFileSync(file, new Uint8Array(options.ranges.buffer));
  const program = join(projectRoot, 'native/bench/out/bare_capture');
  const args = ['--pid', `${options.pid}`, '--ranges', file, '--mode', options.mode];
  args.push('--threads', `${options.threads}`, '--batch-bytes', `${4 * 1024 * 1024}`);
  if (options.mode !== 'readv') args.push('--out', out);
  if (options.socketPath !== undefined) args.push('--socket', options.socketPath);
  const text = execFileSync(program, args, { encoding: 'utf8' });
  rmSync(out, { force: true });
  return JSON.parse(text) as BareResult;
}

export function median(values: readonly number[]): number {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  const at = (index: number): number => sorted[index] ?? NaN;
  return sorted.length % 2 === 1 ? at(middle) : (at(middle - 1) + at(middle)) / 2;
}

export function percentile(values: readonly number[], share: number): number {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.ceil(share * sorted.length) - 1)] ?? NaN;
}
