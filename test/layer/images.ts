/** Layers of known content for tests: a plain model beside every file. */
import { randomUUID } from 'node:crypto';
import { join } from 'node:path';
import { compressBatch, compressBound } from '../../src/layer/compress.ts';
import { ZEROED_ROW } from '../../src/layer/format.ts';
import type { Compression } from '../../src/layer/format.ts';
import { LayerWriter } from '../../src/layer/layer-writer.ts';
import type { SealedLayer, SegmentBatch } from '../../src/layer/layer-writer.ts';
import { bytes, layerUuid } from '../../src/units.ts';
import type { LayerUuid } from '../../src/units.ts';

/** What a write puts there. `zeroed` is a segment without bytes, `zeros` are stored ones. */
export const fills = ['text', 'noise', 'zeros', 'zeroed'] as const;
export type Fill = (typeof fills)[number];

/** One range of a layer, in units of `unit` bytes. */
export interface Write {
  readonly at: number;
  readonly count: number;
  readonly fill: Fill;
  readonly salt: number;
}

export interface LayerSpec {
  readonly writes: readonly Write[];
  readonly compression: Compression;
  readonly blockBytes: number;
  /** Writes in one batch, at most. */
  readonly batchWrites: number;
}

/** Deterministic noise: xorshift32. */
export function noise(seed: number, length: number): Uint8Array {
  const out = new Uint32Array(Math.ceil(length / 4));
  let state = (seed | 0) === 0 ? 1 : seed | 0;
  for (let i = 0; i < out.length; i += 1) {
    state ^= state << 13;
    state ^= state >>> 17;
    state ^= state << 5;
    out[i] = state >>> 0;
  }
  return new Uint8Array(out.buffer, 0, length);
}

export function fillBytes(write: Write, length: number): Uint8Array {
  if (write.fill === 'noise') return noise(write.salt + 1, length);
  const out = new Uint8Array(length);
  if (write.fill === 'text') out.forEach((_, i) => (out[i] = (write.salt + (i >> 5)) & 0x3f));
  return out;
}

/** Writes that do not overlap earlier ones, as a layer must have; order kept. */
export function disjoint(writes: readonly Write[], units: number): Write[] {
  const taken = new Uint8Array(units);
  return writes.flatMap((write) => {
    const at = write.at % units;
    let count = 0;
    while (count < write.count && at + count < units && taken[at + count] === 0) count += 1;
    if (count === 0) return [];
    taken.fill(1, at, at + count);
    return [{ ...write, at, count }];
  });
}

/** Applies a layer to the model. */
export function paint(image: Uint8Array, spec: LayerSpec, unit: number): void {
  for (const write of spec.writes) {
    const length = write.count * unit;
    image.set(
      fillBytes(write, length).subarray(0, image.length - write.at * unit),
      write.at * unit,
    );
  }
}

function batchOf(spec: LayerSpec, writes: readonly Write[], unit: number): SegmentBatch {
  const data = writes.filter((write) => write.fill !== 'zeroed');
  const total = data.reduce((sum, write) => sum + write.count * unit, 0);
  const slab = new Uint8Array(new SharedArrayBuffer(Math.max(total, 1)));
  const rows: bigint[] = [];
  let used = 0;
  for (const write of writes) {
    const length = write.count * unit;
    const zeroed = write.fill === 'zeroed';
    if (!zeroed) slab.set(fillBytes(write, length), used);
    rows.push(BigInt(write.at * unit), BigInt(length), zeroed ? ZEROED_ROW : BigInt(used));
    if (!zeroed) used += length;
  }
  const batch = { slab, rows: BigUint64Array.from(rows) };
  const { compression, blockBytes } = spec;
  if (compression === 'none') return batch;
  const out = new Uint8Array(compressBound(compression, blockBytes, total));
  const compressed = compressBatch({ ...batch, out, algorithm: compression, blockBytes });
  if (compressed === null) throw new Error('compressBound was too small');
  return { ...batch, compressed };
}

export interface WriteLayerOptions {
  readonly folder: string;
  readonly spec: LayerSpec;
  /** Bytes per unit of the spec's writes. */
  readonly unit: number;
  readonly virtualBytes: number;
  readonly parentUuid?: LayerUuid | null;
}

export async function writeLayer(options: WriteLayerOptions): Promise<SealedLayer> {
  const { folder, spec, unit, virtualBytes } = options;
  const uuid = layerUuid(randomUUID());
  await using writer = await LayerWriter.create({
    path: join(folder, uuid),
    uuid,
    parentUuid: options.parentUuid ?? null,
    virtualBytes: bytes(virtualBytes),
    compression: spec.compression,
    blockBytes: spec.blockBytes,
  });
  const appends: Promise<void>[] = [];
  for (let i = 0; i < spec.writes.length; i += spec.batchWrites) {
    const writes = spec.writes.slice(i, i + spec.batchWrites);
    appends.push(writer.append(batchOf(spec, writes, unit)));
  }
  await Promise.all(appends);
  return await writer.seal(new AbortController().signal);
}

/** A chain of layers over one image, bottom first. */
export async function writeChain(
  options: Omit<WriteLayerOptions, 'spec' | 'parentUuid'> & {
    readonly specs: readonly LayerSpec[];
  },
): Promise<SealedLayer[]> {
  const sealed: SealedLayer[] = [];
  for (const spec of options.specs) {
    const parentUuid = sealed.at(-1)?.uuid ?? null;
    sealed.push(await writeLayer({ ...options, spec, parentUuid }));
  }
  return sealed;
}
