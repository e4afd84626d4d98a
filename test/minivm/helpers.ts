import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import path from 'node:path';
import type { MiniVm } from '../../src/minivm/launch.ts';
import { loadNative } from '../../src/minivm/native.ts';
import { GIB } from '../../src/units.ts';

const whyNotKvm = loadNative().probeKvm();
if (whyNotKvm !== '')
  console.log(`only the thread guest is tested, not the KVM guest: ${whyNotKvm}`);

/** The guests that this machine can run. */
export const guests: readonly ('kvm' | 'thread')[] =
  whyNotKvm === '' ? ['kvm', 'thread'] : ['thread'];

/** Two regions, the second from 4 GiB on: 16 MiB and 8 MiB. */
export const twoRegions = [
  { guestAddress: 0n, bytes: 16 * 1024 * 1024 },
  { guestAddress: BigInt(4 * GIB), bytes: 8 * 1024 * 1024 },
];
/** First image page of the second of them. */
export const highPage = 4096;

export class TempFolder implements Disposable {
  readonly path = mkdtempSync(path.join(tmpdir(), 'minivm-test-'));
  file(name: string): string {
    return path.join(this.path, name);
  }
  [Symbol.dispose](): void {
    rmSync(this.path, { recursive: true, force: true });
  }
}

/** Indexes of the set bits. */
export function bitsOf(words: BigUint64Array): number[] {
  const pages: number[] = [];
  words.forEach((word, index) => {
    for (let bit = 0, left = word; left !== 0n; bit += 1, left >>= 1n) {
      if ((left & 1n) === 1n) pages.push(index * 64 + bit);
    }
  });
  return pages;
}

/** The dirty set as the dialect tells it, in image pages. Needs regions of whole 64-page words. */
export async function dirtyPages(vm: MiniVm, dialect: 'aenv' | 'e2b'): Promise<number[]> {
  if (dialect === 'aenv') return rangesOf(vm, '/vm/dirty-memory-ranges');
  const answer = await vm.send('GET', '/memory/dirty');
  const text = answer.body.toString().replace(/\d+/g, '"$&"');
  const { bitmap } = JSON.parse(text) as { bitmap: string[] };
  return bitsOf(BigUint64Array.from(bitmap, BigInt));
}

export async function rangesOf(vm: MiniVm, url: string): Promise<number[]> {
  const answer = await vm.send('GET', url);
  if (answer.status !== 200) throw new Error(answer.body.toString());
  const { ranges } = JSON.parse(answer.body.toString()) as {
    ranges: { image_offset: number; length: number }[];
  };
  return ranges.flatMap(({ image_offset: offset, length }) =>
    Array.from({ length: length / 4096 }, (_, i) => offset / 4096 + i),
  );
}

export async function fault(
  vm: MiniVm,
  method: string,
  url: string,
  body?: unknown,
): Promise<string> {
  const answer = await vm.send(method, url, body);
  if (answer.status !== 400) throw new Error(`${answer.status}: ${answer.body.toString()}`);
  return (JSON.parse(answer.body.toString()) as { fault_message: string }).fault_message;
}
