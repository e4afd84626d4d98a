import { VmmFault } from './answer.ts';
import type { z } from 'zod';
import type { pageChoice } from './control-schema.ts';

export type ChosenPages =
  | { readonly kind: 'list'; readonly list: Float64Array }
  | { readonly kind: 'range'; readonly first: number; readonly count: number };

/** A small seeded generator (SplitMix32): the same seed draws the same pages everywhere. */
export function splitMix32(seed: number): () => number {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x9e3779b9) >>> 0;
    let x = state ^ (state >>> 16);
    x = Math.imul(x, 0x21f0aaad);
    x = Math.imul(x ^ (x >>> 15), 0x735a2d97);
    return (x ^ (x >>> 15)) >>> 0;
  };
}

/** `count` distinct pages of [first, first + span), ascending. */
export function drawPages(seed: number, count: number, first: number, span: number): Float64Array {
  const next = splitMix32(seed);
  const random = (bound: number): number =>
    Math.floor(((next() * 0x200000 + (next() >>> 11)) / 0x20000000000000) * bound);
  // Floyd's way: every step adds exactly one page, whatever the density.
  const drawn = new Set<number>();
  for (let i = span - count; i < span; i += 1) {
    const candidate = random(i + 1);
    drawn.add(drawn.has(candidate) ? i : candidate);
  }
  return Float64Array.from(drawn, (page) => page + first).sort();
}

export function choosePages(choice: z.output<typeof pageChoice>, imagePages: number): ChosenPages {
  if ('pages' in choice) return { kind: 'list', list: Float64Array.from(choice.pages) };
  if ('pageCount' in choice) {
    return { kind: 'range', first: choice.firstPage, count: choice.pageCount };
  }
  const span = choice.spanPages ?? imagePages - choice.firstPage;
  if (choice.firstPage + span > imagePages || choice.count > span) {
    throw new VmmFault(`Cannot draw ${choice.count} pages from ${span} of ${imagePages}`);
  }
  return { kind: 'list', list: drawPages(choice.seed, choice.count, choice.firstPage, span) };
}
