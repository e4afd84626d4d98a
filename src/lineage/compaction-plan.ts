/**
 * Which newest run of a chain to merge. A pure function of the chain.
 *
 * A layer's generation is how often its oldest bytes were rewritten: 0 as captured, one more than the
 * highest of its run as merged. When the chain is full, the run is the longest one at the top whose
 * generations do not pass that of its top layer (one layer alone frees nothing, so then the next
 * generation joins). With d places and r rewrites of a byte at most, that absorbs C(d + r, r + 1)
 * captures before a byte is rewritten once more: 31 places take 496 captures with 1 rewrite, 5,456
 * with 2, 46,376 with 3. It is the binomial transform, which no other choice of newest runs beats.
 *
 * Sizes come in once: a bottom layer of the run that outweighs all above it together stays out, so
 * that a full base is not rewritten for the sake of thin layers on it; but never so many that fewer
 * than half of the places take part. Layers of the launch parent stay out on the same condition: what
 * lies above it could not be told from it any more.
 */
import type { LayerUuid } from '../units.ts';

export interface ChainLayer {
  readonly generation: number;
  /** Guest bytes that it stores: what rewriting it costs. */
  readonly dataBytes: number;
}

export interface CompactionRun {
  /** Position of the run's bottom; it ends with the chain's head. */
  readonly first: number;
  /** Of the layer that replaces it. */
  readonly generation: number;
}

/**
 * Null while the chain has a free place.
 * @param layers bottom to top
 * @param launchDepth how many of them, from the bottom, are the launch parent's
 */
export function planRun(
  layers: readonly ChainLayer[],
  depthMax: number,
  launchDepth: number,
): CompactionRun | null {
  if (layers.length < depthMax || layers.length < 2) return null;
  const placesMin = Math.max(2, Math.floor(depthMax / 2));
  const floor = layers.length - launchDepth >= placesMin ? launchDepth : 0;
  const above = layers.slice(floor);
  const first = floor + dropHeavyBottoms(above, longestRun(above), placesMin);
  const run = layers.slice(first);
  return { first, generation: Math.max(...run.map((layer) => layer.generation)) + 1 };
}

/**
 * How many layers two chains share from the bottom. Fewer than the launch parent has, once a
 * compaction had to merge some of it: then more counts as above it, which is correct and only wider.
 */
export function sharedDepth(
  chain: readonly { readonly uuid: LayerUuid }[],
  launch: readonly { readonly uuid: LayerUuid }[],
): number {
  const differing = launch.findIndex((layer, depth) => layer.uuid !== chain[depth]?.uuid);
  return differing < 0 ? launch.length : differing;
}

function longestRun(layers: readonly ChainLayer[]): number {
  let first = layers.length - 1;
  let limit = layers[first]?.generation ?? 0;
  for (;;) {
    while (first > 0 && (layers[first - 1]?.generation ?? 0) <= limit) first -= 1;
    if (first < layers.length - 1) return first;
    limit = layers[first - 1]?.generation ?? 0;
  }
}

function dropHeavyBottoms(
  layers: readonly ChainLayer[],
  longest: number,
  placesMin: number,
): number {
  let above = 0;
  for (const layer of layers.slice(longest)) above += layer.dataBytes;
  let first = longest;
  while (layers.length - first > 2) {
    const bottom = layers[first]?.dataBytes ?? 0;
    above -= bottom;
    const leavesTooFew = layers.length - (first + 1) < Math.min(placesMin, layers.length - longest);
    if (bottom <= above || leavesTooFew) break;
    first += 1;
  }
  return first;
}
