/**
 * The plain model of a guest's memory: an array of pages, each an immutable buffer of 4 KiB. What a
 * program or a device of the small VM writes is computed here on its own (native/minivm/mailbox.hpp
 * and src/minivm/control.ts say how), never read back from the VM that is tested.
 */
import { splitMix32 } from '../../../src/minivm/page-choice.ts';

export const PAGE = 4096;
export type Image = Buffer[];
export const zeroPage: Buffer = Buffer.alloc(PAGE);

export const freshImage = (pages: number): Image => new Array<Buffer>(pages).fill(zeroPage);

/** A seeded source of choices. */
export class Random {
  readonly #next: () => number;

  constructor(seed: number) {
    this.#next = splitMix32(seed);
  }

  /** 0 ≤ result < bound. */
  below(bound: number): number {
    return Math.floor((this.#next() / 0x1_0000_0000) * bound);
  }

  between(low: number, high: number): number {
    return low + this.below(high - low + 1);
  }

  chance(share: number): boolean {
    return this.#next() / 0x1_0000_0000 < share;
  }

  pick<T>(items: readonly T[]): T {
    const item = items[this.below(items.length)];
    if (item === undefined) throw new Error('nothing to pick from');
    return item;
  }

  /** An item by its weight. */
  weighted<T extends string>(weights: Readonly<Record<T, number>>): T {
    const entries = Object.entries(weights) as [T, number][];
    let at = this.below(entries.reduce((sum, [, weight]) => sum + weight, 0));
    for (const [item, weight] of entries) {
      if (at < weight) return item;
      at -= weight;
    }
    throw new Error('nothing to pick from');
  }

  word(): number {
    return this.#next();
  }
}

const poolBytes = 0x101000;
let pool: Buffer | undefined;

/** The pool that `random` pages are cut from: xorshift64, 8 bytes at a time. */
function poolOfRandom(): Buffer {
  if (pool !== undefined) return pool;
  const made = Buffer.alloc(poolBytes);
  let state = 0x9e3779b97f4a7c15n;
  for (let at = 0; at < poolBytes; at += 8) {
    state = BigInt.asUintN(64, state ^ (state << 13n));
    state ^= state >> 7n;
    state = BigInt.asUintN(64, state ^ (state << 17n));
    made.writeBigUInt64LE(state, at);
  }
  pool = made;
  return made;
}

function mix32(from: number): number {
  let x = from >>> 0;
  x = Math.imul(x ^ (x >>> 16), 0x7feb352d);
  x = Math.imul(x ^ (x >>> 15), 0x846ca68b);
  return (x ^ (x >>> 16)) >>> 0;
}

export interface Fill {
  readonly fill: 'random' | 'constant' | 'zero';
  readonly value: number;
  /** 32-bit words from the start of the page. */
  readonly words: number;
}

/** What one pass of a guest's program leaves in a page. @param guestPage its guest-physical number */
export function afterProgram(before: Buffer, guestPage: number, how: Fill): Buffer {
  const page = Buffer.from(before);
  if (how.fill !== 'random') {
    const value = how.fill === 'zero' ? 0 : how.value;
    for (let word = 0; word < how.words; word += 1) page.writeUInt32LE(value, word * 4);
    return page.equals(zeroPage) ? zeroPage : page;
  }
  const first = mix32(how.value ^ Math.imul(guestPage, 0x85ebca6b));
  const from = first & 0xffffc;
  poolOfRandom().copy(page, 0, from, from + how.words * 4);
  page.writeUInt32LE(first, 0);
  page.writeUInt32LE(guestPage, 4);
  return page;
}

/** What a device write leaves in a page of the image. */
export function afterDevice(imagePage: number, value: number): Buffer {
  const next = splitMix32(value ^ Math.imul(imagePage, 0x85ebca6b));
  const page = Buffer.alloc(PAGE);
  for (let word = 0; word < PAGE / 4; word += 1) page.writeUInt32LE(next(), word * 4);
  return page;
}

/** What a snapshot must read as. */
export interface Expected {
  readonly image: readonly Buffer[];
  /**
   * The guest was writing when it was taken: these pages, in this order, became `after`. The
   * snapshot is one moment of that, so some first ones are new and all others old; one page at most
   * may be half written.
   */
  readonly writing?: { readonly order: readonly number[]; readonly after: readonly Buffer[] };
}

/** What is wrong with the bytes of an image, or null. */
export function difference(bytes: Buffer, expected: Expected): string | null {
  const { image, writing } = expected;
  if (bytes.length !== image.length * PAGE)
    return `${bytes.length} bytes, not ${image.length} pages`;
  const order = new Set(writing?.order);
  const wrong: number[] = [];
  for (let page = 0; page < image.length; page += 1) {
    const read = bytes.subarray(page * PAGE, (page + 1) * PAGE);
    if (!order.has(page) && !read.equals(image[page] ?? zeroPage)) wrong.push(page);
  }
  if (wrong.length > 0) {
    const zeros = wrong.filter((page) =>
      bytes.subarray(page * PAGE, (page + 1) * PAGE).equals(zeroPage),
    );
    return `${wrong.length} pages differ (${zeros.length} read zero): ${wrong.slice(0, 12).join(' ')}`;
  }
  return writing === undefined ? null : cutProblem(bytes, image, writing);
}

function cutProblem(
  bytes: Buffer,
  image: readonly Buffer[],
  writing: NonNullable<Expected['writing']>,
): string | null {
  const states = writing.order.map((page, index) => {
    const read = bytes.subarray(page * PAGE, (page + 1) * PAGE);
    const isOld = read.equals(image[page] ?? zeroPage);
    const isNew = read.equals(writing.after[index] ?? zeroPage);
    if (isOld && isNew) return 'either';
    if (isOld) return 'old';
    return isNew ? 'new' : 'half';
  });
  const lastNew = states.lastIndexOf('new');
  const firstOther = states.findIndex((state) => state === 'old' || state === 'half');
  const halves = states.filter((state) => state === 'half').length;
  if (halves > 1) return `${halves} of the pages that were being written are neither old nor new`;
  if (firstOther >= 0 && firstOther < lastNew) {
    const [late, early] = [lastNew, firstOther].map((at) => String(writing.order[at]));
    return `page ${late} is new and ${early}, written before it, is not`;
  }
  return null;
}
