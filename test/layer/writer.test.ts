import { createHash, randomUUID } from 'node:crypto';
import { mkdtemp, readdir, readFile, rm, stat, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, test } from 'vitest';
import { compressBatch, compressBound } from '../../src/layer/compress.ts';
import { ZEROED_ROW, compressions } from '../../src/layer/format.ts';
import type { Compression } from '../../src/layer/format.ts';
import { LayerStack } from '../../src/layer/layer-stack.ts';
import { LayerWriter } from '../../src/layer/layer-writer.ts';
import type { LayerWriterOptions, SegmentBatch } from '../../src/layer/layer-writer.ts';
import { Failure } from '../../src/result.ts';
import { bytes, layerUuid, MIB } from '../../src/units.ts';
import { value } from './support.ts';

let folder: string;
beforeEach(async () => {
  folder = await mkdtemp(join(tmpdir(), 'varve-writer-'));
});
afterEach(() => rm(folder, { recursive: true, force: true }));

const never = new AbortController().signal;
const options = (compression: Compression = 'none'): LayerWriterOptions => ({
  path: join(folder, 'layer'),
  uuid: layerUuid(randomUUID()),
  parentUuid: null,
  virtualBytes: bytes(4 * MIB),
  compression,
  blockBytes: 4096,
});

/** Two data ranges and a zeroed one, in descending image order, slab parts out of order too. */
function sampleBatch(compression: Compression): SegmentBatch {
  const slab = new Uint8Array(new SharedArrayBuffer(64 * 1024));
  for (let i = 0; i < slab.length; i += 1) slab[i] = (i * 7 + (i >> 8)) & 0xff;
  const rows = BigUint64Array.from([
    ...[2n << 20n, 8192n, 16384n],
    ...[1n << 20n, 1n << 16n, ZEROED_ROW],
    ...[0n, 4096n, 0n],
  ]);
  if (compression === 'none') return { slab, rows };
  const out = new Uint8Array(compressBound(compression, 4096, 12288));
  const made = compressBatch({ slab, rows, out, algorithm: compression, blockBytes: 4096 });
  if (made === null) throw new Error('no room');
  return { slab, rows, compressed: made };
}

/** Pages filled with one byte, or zeroed. */
function filled(
  compression: Compression,
  first: number,
  count: number,
  fill: number | null,
): SegmentBatch {
  const length = count * 4096;
  const slab = new Uint8Array(new SharedArrayBuffer(length)).fill(fill ?? 0);
  const at = fill === null ? ZEROED_ROW : 0n;
  const rows = BigUint64Array.from([BigInt(first * 4096), BigInt(length), at]);
  if (compression === 'none') return { slab, rows };
  const out = new Uint8Array(compressBound(compression, 4096, length));
  const made = compressBatch({ slab, rows, out, algorithm: compression, blockBytes: 4096 });
  if (made === null) throw new Error('no room');
  return { slab, rows, compressed: made };
}

async function kindOf(promise: Promise<unknown>): Promise<string> {
  try {
    await promise;
    return 'no failure';
  } catch (error) {
    if (error instanceof Failure) return (error as Failure).detail.kind;
    throw error;
  }
}

describe.each(compressions)('a %s layer', (compression) => {
  test('reads back what was appended, under its digest, read-only', async () => {
    const wanted = options(compression);
    await using writer = await LayerWriter.create(wanted);
    const batch = sampleBatch(compression);
    await writer.append(batch);
    const sealed = await writer.seal(never);
    const file = await readFile(wanted.path);
    expect(sealed.digest).toBe(`sha256:${createHash('sha256').update(file).digest('hex')}`);
    expect(sealed.sizeBytes).toBe(file.length);
    expect(sealed).toMatchObject({ dataBytes: 12288, zeroedBytes: 65536, segmentCount: 3 });
    expect((await stat(wanted.path)).mode & 0o777).toBe(0o444);
    expect(await readdir(folder)).toEqual(['layer']);
    await using stack = value(await LayerStack.open([wanted.path], { order: 'check' }));
    const image = new Uint8Array(stack.virtualBytes);
    value(await stack.read(bytes(0), image));
    const expected = new Uint8Array(4 * MIB);
    expected.set(batch.slab.subarray(16384, 16384 + 8192), 2 * MIB);
    expected.set(batch.slab.subarray(0, 4096), 0);
    expect(Buffer.compare(image, expected)).toBe(0);
    expect(stack.layers[0]).toMatchObject({ uuid: wanted.uuid, compression });
  });

  test('reads what was appended last, where a later batch superseded an earlier one', async () => {
    const wanted = options(compression);
    await using writer = await LayerWriter.create(wanted);
    const page = 4096;
    const expected = new Uint8Array(4 * MIB);
    // Pages of each batch, and the byte they are filled with; null: zeroed.
    const rounds: [number, number, number | null][][] = [
      [
        [0, 8, 1],
        [20, 4, 2],
      ],
      [
        [2, 2, 3],
        [7, 14, 4],
        [23, 3, null],
      ],
      [],
      [
        [3, 1, null],
        [10, 1, 5],
        [24, 1, 6],
        [0, 1, 7],
      ],
    ];
    for (const [round, parts] of rounds.entries()) {
      if (round > 0) writer.supersede();
      for (const [first, count, fill] of parts) {
        await writer.append(filled(compression, first, count, fill));
        expected.fill(fill ?? 0, first * page, (first + count) * page);
      }
    }
    const sealed = await writer.seal(never);
    expect(sealed.dataBytes).toBe(23 * page);
    expect(sealed.zeroedBytes).toBe(3 * page);
    // Of the first 0, 2, 3, 7, 20 and 23; of the second 3 and 10.
    expect(sealed.supersededBytes).toBe(8 * page);
    await using stack = value(await LayerStack.open([wanted.path], { order: 'check' }));
    const image = new Uint8Array(stack.virtualBytes);
    value(await stack.read(bytes(0), image));
    expect(Buffer.compare(image, expected)).toBe(0);
    expect(stack.layers[0]).toMatchObject({ dataBytes: 23 * page });
  });

  test('takes batches that only zero', async () => {
    const wanted = options(compression);
    await using writer = await LayerWriter.create(wanted);
    await writer.append(filled(compression, 3, 2, null));
    expect(await writer.seal(never)).toMatchObject({ dataBytes: 0, zeroedBytes: 8192 });
  });

  test('with nothing in it is valid and reads as zero', async () => {
    const wanted = options(compression);
    await using writer = await LayerWriter.create(wanted);
    const sealed = await writer.seal(never);
    if (compression === 'none') expect(sealed.sizeBytes).toBe(8192);
    await using stack = value(await LayerStack.open([wanted.path]));
    const image = new Uint8Array(stack.virtualBytes).fill(1);
    value(await stack.read(bytes(0), image));
    expect(image.every((byte) => byte === 0)).toBe(true);
  });
});

test('disposing of an unsealed writer leaves nothing', async () => {
  {
    await using writer = await LayerWriter.create(options());
    await writer.append(sampleBatch('none'));
  }
  expect(await readdir(folder)).toEqual([]);
});

test('an existing file is never overwritten, also when it appears while writing', async () => {
  const wanted = options();
  await using writer = await LayerWriter.create(wanted);
  await writeFile(wanted.path, 'precious');
  expect(await kindOf(LayerWriter.create(wanted))).toBe('layer-exists');
  expect(await kindOf(writer.seal(never))).toBe('layer-exists');
  await writer[Symbol.asyncDispose]();
  expect(await readFile(wanted.path, 'utf8')).toBe('precious');
  expect(await readdir(folder)).toEqual(['layer']);
});

test('overlapping segments are refused at seal', async () => {
  await using writer = await LayerWriter.create(options());
  const slab = new Uint8Array(8192);
  await writer.append({ slab, rows: BigUint64Array.from([0n, 8192n, 0n]) });
  await writer.append({ slab, rows: BigUint64Array.from([4096n, 4096n, 0n]) });
  expect(await kindOf(writer.seal(never))).toBe('layer-overlap');
  expect(await kindOf(writer.seal(never))).toBe('layer-poisoned');
});

test('segments between two supersedes still must not overlap', async () => {
  await using writer = await LayerWriter.create(options());
  await writer.append(filled('none', 0, 4, 1));
  writer.supersede();
  await writer.append(filled('none', 0, 2, 2));
  await writer.append(filled('none', 1, 2, 3));
  expect(() => writer.supersede()).toThrow('two segments for the same bytes');
  expect(await kindOf(writer.seal(never))).toBe('layer-poisoned');
});

test('a cancelled seal keeps nothing', async () => {
  {
    await using writer = await LayerWriter.create(options());
    await writer.append(sampleBatch('none'));
    expect(await kindOf(writer.seal(AbortSignal.abort()))).toBe('layer-cancelled');
    expect(await kindOf(writer.append(sampleBatch('none')))).toBe('layer-poisoned');
  }
  expect(await readdir(folder)).toEqual([]);
});
