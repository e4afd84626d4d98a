import { mkdtemp, readFile, rm } from 'node:fs/promises';
import { randomUUID } from 'node:crypto';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import fc from 'fast-check';
import { expect, test } from 'vitest';
import { flattenStack } from '../../src/layer/flatten.ts';
import { compressions } from '../../src/layer/format.ts';
import { LayerStack } from '../../src/layer/layer-stack.ts';
import { mergeLayers } from '../../src/layer/merge.ts';
import { compareWithStack, readStackNow } from '../../src/layer/shared-stack.ts';
import { verifyLayers } from '../../src/layer/verify.ts';
import { bytes, layerUuid, PAGE_BYTES, SECTOR_BYTES } from '../../src/units.ts';
import { disjoint, fills, noise, paint, writeChain } from './images.ts';
import type { LayerSpec } from './images.ts';
import { value } from './support.ts';

const seed = Number(process.env['SEED'] ?? Date.now() % 2 ** 31);
const runs = Number(process.env['RUNS'] ?? 25);
console.log(`layer model: SEED=${seed} RUNS=${runs}`);
const never = new AbortController().signal;

const IMAGE_PAGES = 96;

/** One layer; whole pages or single sectors. */
const layerSpec = (unit: number): fc.Arbitrary<LayerSpec> => {
  const units = (IMAGE_PAGES * PAGE_BYTES) / unit;
  const write = fc.record({
    at: fc.oneof(fc.nat(units - 1), fc.constantFrom(0, units - 1)),
    count: fc.oneof(fc.integer({ min: 1, max: 40 }), fc.constant(units)),
    fill: fc.constantFrom(...fills),
    salt: fc.nat(1000),
  });
  return fc.record({
    writes: fc.array(write, { maxLength: 12 }).map((writes) => disjoint(writes, units)),
    compression: fc.constantFrom(...compressions),
    blockBytes: fc.constantFrom(4096, 8192, 16384, 32768),
    batchWrites: fc.integer({ min: 1, max: 5 }),
  });
};

const chains = fc.constantFrom(PAGE_BYTES, SECTOR_BYTES).chain((unit) =>
  fc.record({
    unit: fc.constant(unit),
    specs: fc.array(layerSpec(unit), { minLength: 1, maxLength: 5 }),
  }),
);

async function readAll(paths: readonly string[]): Promise<Uint8Array> {
  await using stack = value(await LayerStack.open(paths, { order: 'check' }));
  const image = new Uint8Array(stack.virtualBytes);
  value(await stack.read(bytes(0), image));
  return image;
}

/** Odd ranges, asynchronously and at once. */
async function checkPieces(paths: readonly string[], image: Uint8Array): Promise<void> {
  await using stack = value(await LayerStack.open(paths));
  for (const [offset, length] of [
    [1, 511],
    [511, 2],
    [4095, 8194],
    [100_001, 77_777],
  ] as const) {
    const into = new Uint8Array(length).fill(0xaa);
    value(await stack.read(bytes(offset), into));
    expect(Buffer.compare(into, image.subarray(offset, offset + length))).toBe(0);
    into.fill(0x55);
    value(readStackNow(stack.shared(), bytes(offset), into));
    expect(Buffer.compare(into, image.subarray(offset, offset + length))).toBe(0);
  }
}

/** Every second page changed in one byte, in one of two rows whose slab order is reversed. */
async function checkCompare(paths: readonly string[], image: Uint8Array): Promise<void> {
  await using stack = value(await LayerStack.open(paths));
  const half = (IMAGE_PAGES / 2) * PAGE_BYTES;
  const slab = new Uint8Array(new SharedArrayBuffer(image.length));
  slab.set(image.subarray(half), 0);
  slab.set(image.subarray(0, half), half);
  const isChanged = (page: number): boolean => page % 3 === 1;
  for (let page = 0; page < IMAGE_PAGES; page += 1) {
    const at = ((page * PAGE_BYTES + half) % image.length) + ((page * 977) % PAGE_BYTES);
    if (isChanged(page)) slab[at] = (slab[at] ?? 0) ^ 1;
  }
  const rows = BigUint64Array.from([0, half, half, half, half, 0].map(BigInt));
  const equal = value(compareWithStack({ stack: stack.shared(), slab, rows }));
  for (let page = 0; page < IMAGE_PAGES; page += 1) {
    const bit = ((equal[page >> 3] ?? 0) >> (page & 7)) & 1;
    expect([page, bit]).toEqual([page, isChanged(page) ? 0 : 1]);
  }
  const zeroed = BigUint64Array.from([0n, BigInt(image.length), 2n ** 64n - 1n]);
  const zeros = value(compareWithStack({ stack: stack.shared(), slab, rows: zeroed }));
  for (let page = 0; page < IMAGE_PAGES; page += 1) {
    const isZero = image.subarray(page * PAGE_BYTES, (page + 1) * PAGE_BYTES).every((b) => b === 0);
    expect(((zeros[page >> 3] ?? 0) >> (page & 7)) & 1).toBe(isZero ? 1 : 0);
  }
}

async function checkMerges(
  folder: string,
  paths: readonly string[],
  image: Uint8Array,
): Promise<void> {
  for (let from = 0; from < paths.length; from += 2) {
    const to = Math.min(paths.length, from + 3);
    const output = join(folder, `merged-${from}-${randomUUID()}`);
    const { sealed } = value(
      await mergeLayers({
        paths: paths.slice(from, to),
        output,
        uuid: layerUuid(randomUUID()),
        below: from === 0 ? [] : paths.slice(0, from),
        compression: compressions[(from + paths.length) % 3] ?? 'none',
        blockBytes: 8192,
        signal: never,
      }),
    );
    if (from === 0) expect(sealed.zeroedBytes).toBe(0);
    // The layer above has the old parent: order is the caller's business after a merge.
    await using stack = value(
      await LayerStack.open([...paths.slice(0, from), output, ...paths.slice(to)]),
    );
    const got = new Uint8Array(stack.virtualBytes);
    value(await stack.read(bytes(0), got));
    expect(Buffer.compare(got, image)).toBe(0);
  }
}

test('random chains read, flatten, compare, merge and verify as the model says', async () => {
  const property = fc.asyncProperty(chains, async ({ unit, specs }) => {
    const folder = await mkdtemp(join(tmpdir(), 'varve-model-'));
    try {
      const virtualBytes = IMAGE_PAGES * PAGE_BYTES;
      const sealed = await writeChain({ folder, specs, unit, virtualBytes });
      const image = new Uint8Array(virtualBytes);
      for (const spec of specs) paint(image, spec, unit);
      const paths = sealed.map((layer) => layer.path);
      expect(Buffer.compare(await readAll(paths), image)).toBe(0);
      await checkPieces(paths, image);
      await checkCompare(paths, image);
      await checkMerges(folder, paths, image);
      await using stack = value(await LayerStack.open(paths));
      const path = join(folder, 'flat');
      value(await flattenStack(stack, { path, signal: never }));
      expect(Buffer.compare(await readFile(path), image)).toBe(0);
      const digests = sealed.map((layer) => layer.digest);
      const report = await verifyLayers({ paths, digests, signal: never });
      expect(report).toMatchObject({ sound: true, chain: [] });
    } finally {
      await rm(folder, { recursive: true, force: true });
    }
  });
  await fc.assert(property, { seed, numRuns: runs });
}, 300_000);

test('noise is noise: the generator repeats for a seed and differs between seeds', () => {
  expect(noise(5, 64)).toEqual(noise(5, 64));
  expect(noise(5, 64)).not.toEqual(noise(6, 64));
});
