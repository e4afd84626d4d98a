import { expect, test } from 'vitest';
import { planRun } from '../../src/lineage/compaction-plan.ts';
import type { ChainLayer } from '../../src/lineage/compaction-plan.ts';

interface Simulated {
  readonly ratio: number;
  readonly depthPeak: number;
  readonly generationPeak: number;
}

/** Captures of these sizes, one after the other, with a compaction whenever the plan asks for one. */
function simulate(
  sizes: readonly number[],
  depthMax: number,
  merged: (run: readonly number[]) => number,
): Simulated {
  let chain: ChainLayer[] = [];
  let captured = 0;
  let rewritten = 0;
  let depthPeak = 0;
  let generationPeak = 0;
  for (const size of sizes) {
    captured += size;
    chain.push({ generation: 0, dataBytes: size });
    depthPeak = Math.max(depthPeak, chain.length);
    const plan = planRun(chain, depthMax, 0);
    if (plan === null) continue;
    const dataBytes = merged(chain.slice(plan.first).map((layer) => layer.dataBytes));
    rewritten += dataBytes;
    chain = [...chain.slice(0, plan.first), { generation: plan.generation, dataBytes }];
    generationPeak = Math.max(generationPeak, plan.generation);
  }
  return { ratio: rewritten / captured, depthPeak, generationPeak };
}

/** Every capture rewrites the same pages: a merged layer is as large as one of them. */
const same = (run: readonly number[]): number => Math.max(...run);
/** No two captures share a page. */
const disjoint = (run: readonly number[]): number => run.reduce((sum, size) => sum + size, 0);

function generator(seed: number): () => number {
  let state = seed;
  return () => {
    state = (state * 1103515245 + 12345) % 2 ** 31;
    return state / 2 ** 31;
  };
}

const seed = Number(process.env['SEED'] ?? Date.now() % 2 ** 31);
console.log(`compaction-plan seed ${seed}`);
const random = generator(seed);

const shapes: Record<string, (i: number, n: number) => number> = {
  hot: () => 64,
  'base and hot': (i) => (i === 0 ? 16_384 : 64),
  random: () => Math.exp(random() * 10),
  growing: (i) => i + 1,
  shrinking: (i, n) => n - i,
  'halving, again and again': (i) => 2 ** (40 - (i % 40)),
  'doubling, again and again': (i) => 2 ** (i % 40),
};

test('1,000 captures rewrite at most 4 bytes per byte captured and stay within max_chain', () => {
  for (const [name, size] of Object.entries(shapes)) {
    for (const merged of [same, disjoint]) {
      const sizes = Array.from({ length: 1000 }, (_, i) => size(i, 1000));
      const { ratio, depthPeak } = simulate(sizes, 28, merged);
      console.log(`${name}, ${merged.name}: ${ratio.toFixed(2)} rewritten per byte captured`);
      expect(ratio, name).toBeLessThan(4);
      expect(depthPeak, name).toBeLessThanOrEqual(28);
    }
  }
});

test('even 10,000 captures of disjoint sets rewrite at most 4 bytes per byte captured', () => {
  const sizes = Array.from({ length: 10_000 }, () => 64);
  const { ratio, depthPeak, generationPeak } = simulate(sizes, 28, disjoint);
  expect(ratio).toBeLessThan(4);
  expect(depthPeak).toBe(28);
  expect(generationPeak).toBe(3);
});

test('a byte is rewritten once at most in C(d + 1, 2) captures, twice at most in C(d + 2, 3)', () => {
  for (const depthMax of [2, 3, 8, 28]) {
    const places = depthMax;
    const once = (places * (places + 1)) / 2;
    const twice = (places * (places + 1) * (places + 2)) / 6;
    const run = (n: number) =>
      simulate(
        Array.from({ length: n }, () => 1),
        depthMax,
        disjoint,
      );
    expect(run(once - 1).generationPeak, `${depthMax}`).toBeLessThanOrEqual(1);
    expect(run(twice - 1).generationPeak, `${depthMax}`).toBeLessThanOrEqual(2);
  }
});

test('a base that outweighs what is on it stays out of the run', () => {
  const thin = Array.from({ length: 27 }, () => ({ generation: 0, dataBytes: 10 }));
  expect(planRun([{ generation: 0, dataBytes: 10_000 }, ...thin], 28, 0)?.first).toBe(1);
  expect(planRun([{ generation: 0, dataBytes: 100 }, ...thin], 28, 0)?.first).toBe(0);
});

test('heavy bottoms never take more than half of the places', () => {
  const halving = Array.from({ length: 28 }, (_, i) => ({
    generation: 0,
    dataBytes: 2 ** (40 - i),
  }));
  expect(planRun(halving, 28, 0)?.first).toBe(14);
});

const layers = (n: number, generation = 0): ChainLayer[] =>
  Array.from({ length: n }, () => ({ generation, dataBytes: 1 }));

test('a chain with a free place is left alone; a full one always loses a layer', () => {
  expect(planRun(layers(27), 28, 0)).toBeNull();
  expect(planRun(layers(1), 1, 0)).toBeNull();
  expect(planRun([...layers(27, 3), ...layers(1)], 28, 0)).toEqual({ first: 0, generation: 4 });
  expect(planRun([...layers(26, 3), ...layers(2)], 28, 0)).toEqual({ first: 26, generation: 1 });
  const stairs = Array.from({ length: 28 }, (_, i) => ({ generation: 28 - i, dataBytes: 1 }));
  expect(planRun(stairs, 28, 0)).toEqual({ first: 26, generation: 3 });
});

test('layers of the launch parent stay out, unless they leave fewer than half of the places', () => {
  expect(planRun(layers(28), 28, 14)).toEqual({ first: 14, generation: 1 });
  expect(planRun(layers(28), 28, 15)).toEqual({ first: 0, generation: 1 });
  expect(planRun([...layers(10, 1), ...layers(18)], 28, 12)?.first).toBe(12);
});
