/** Merging layers of different sizes: what a smaller layer hides, a larger one on top uncovers. */
import { mkdtemp, rm } from 'node:fs/promises';
import { randomUUID } from 'node:crypto';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import fc from 'fast-check';
import { expect, test } from 'vitest';
import { compressions } from '../../src/layer/format.ts';
import { LayerStack } from '../../src/layer/layer-stack.ts';
import { mergeLayers } from '../../src/layer/merge.ts';
import { bytes, layerUuid, MIB, PAGE_BYTES, type LayerUuid } from '../../src/units.ts';
import { disjoint, fills, writeLayer, type LayerSpec, type Write } from './images.ts';
import { value } from './support.ts';

const seed = Number(process.env['SEED'] ?? Date.now() % 2 ** 31);
const runs = Number(process.env['RUNS'] ?? 40);
console.log(`merged sizes: SEED=${seed} RUNS=${runs}`);
const never = new AbortController().signal;

async function read(paths: readonly string[]): Promise<Buffer> {
  await using stack = value(await LayerStack.open(paths));
  const image = Buffer.alloc(stack.virtualBytes);
  value(await stack.read(bytes(0), image));
  return image;
}

async function merged(
  folder: string,
  paths: readonly string[],
  below: readonly string[],
): Promise<string> {
  const output = join(folder, `merged-${randomUUID()}`);
  const uuid = layerUuid(randomUUID());
  const format = { compression: 'none', blockBytes: 4096 } as const;
  value(await mergeLayers({ paths, output, uuid, below, ...format, signal: never }));
  return output;
}

async function inFolder(work: (folder: string) => Promise<void>): Promise<void> {
  const folder = await mkdtemp(join(tmpdir(), 'varve-merge-sizes-'));
  try {
    await work(folder);
  } finally {
    await rm(folder, { recursive: true, force: true });
  }
}

const spec = (writes: readonly Write[]): LayerSpec => ({
  writes,
  compression: 'none',
  blockBytes: 4096,
  batchWrites: 4,
});

test('data past the end of a smaller layer is there again under a larger one', async () => {
  await inFolder(async (folder) => {
    const unit = PAGE_BYTES;
    const at = (1.5 * MIB) / unit;
    const write = { at, count: 2, fill: 'noise', salt: 3 } as const;
    const sizes = [2 * MIB, MIB, 2 * MIB];
    const paths: string[] = [];
    let parentUuid: LayerUuid | null = null;
    for (const [index, virtualBytes] of sizes.entries()) {
      const own = spec(index === 0 ? [write] : []);
      const sealed = await writeLayer({ folder, spec: own, unit, virtualBytes, parentUuid });
      parentUuid = sealed.uuid;
      paths.push(sealed.path);
    }
    const [a = '', b = '', c = ''] = paths;
    const expected = await read([a, b, c]);
    expect(expected.subarray(at * unit, (at + 2) * unit).every((byte) => byte === 0)).toBe(false);
    const ab = await merged(folder, [a, b], []);
    expect((await read([ab])).length).toBe(MIB);
    expect((await read([ab, c])).equals(expected)).toBe(true);
  });
});

const IMAGE_PAGES = 64;
const layers = fc.array(
  fc.record({
    pages: fc.integer({ min: 1, max: IMAGE_PAGES }),
    compression: fc.constantFrom(...compressions),
    writes: fc.array(
      fc.record({
        at: fc.nat(IMAGE_PAGES - 1),
        count: fc.integer({ min: 1, max: 24 }),
        fill: fc.constantFrom(...fills),
        salt: fc.nat(1000),
      }),
      { maxLength: 6 },
    ),
  }),
  { minLength: 2, maxLength: 6 },
);

test('a stack of random sizes reads the same with any run of it merged', async () => {
  const property = fc.asyncProperty(layers, fc.nat(), fc.nat(), async (made, first, count) => {
    await inFolder(async (folder) => {
      const unit = PAGE_BYTES;
      const paths: string[] = [];
      let parentUuid: LayerUuid | null = null;
      for (const { pages, compression, writes } of made) {
        const own = { ...spec(disjoint(writes, pages)), compression };
        const virtualBytes = pages * unit;
        const sealed = await writeLayer({ folder, spec: own, unit, virtualBytes, parentUuid });
        parentUuid = sealed.uuid;
        paths.push(sealed.path);
      }
      const virtualBytes = IMAGE_PAGES * unit;
      const top = { folder, spec: spec([]), unit, virtualBytes, parentUuid };
      const whole = (await writeLayer(top)).path;
      const from = first % (paths.length - 1);
      const to = from + 2 + (count % (paths.length - from - 1));
      const output = await merged(folder, paths.slice(from, to), paths.slice(0, from));
      const swapped = [...paths.slice(0, from), output, ...paths.slice(to)];
      expect((await read(swapped)).equals(await read(paths))).toBe(true);
      expect((await read([...swapped, whole])).equals(await read([...paths, whole]))).toBe(true);
    });
  });
  await fc.assert(property, { seed, numRuns: runs });
}, 300_000);
