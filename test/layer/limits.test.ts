import { execFileSync } from 'node:child_process';
import { randomUUID } from 'node:crypto';
import { mkdtemp, open, readdir, rm, stat } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { Worker } from 'node:worker_threads';
import { afterEach, beforeEach, describe, expect, test } from 'vitest';
import { compressBatch, compressBound } from '../../src/layer/compress.ts';
import { SEGMENTS_MAX, ZEROED_ROW } from '../../src/layer/format.ts';
import { LayerStack } from '../../src/layer/layer-stack.ts';
import { LayerWriter } from '../../src/layer/layer-writer.ts';
import { readStackNow } from '../../src/layer/shared-stack.ts';
import { Failure } from '../../src/result.ts';
import { bytes, GIB, layerUuid, MIB, PAGE_BYTES } from '../../src/units.ts';
import { noise, paint, writeChain, writeLayer } from './images.ts';
import type { LayerSpec, Write } from './images.ts';
import { value, vectorPath } from './support.ts';

let folder: string;
beforeEach(async () => {
  folder = await mkdtemp(join(tmpdir(), 'varve-limits-'));
});
afterEach(() => rm(folder, { recursive: true, force: true }));

const never = new AbortController().signal;
const newLayer = (virtualBytes: number, compression: LayerSpec['compression'] = 'none') => ({
  path: join(folder, randomUUID()),
  uuid: layerUuid(randomUUID()),
  parentUuid: null,
  virtualBytes: bytes(virtualBytes),
  compression,
  blockBytes: 4096,
});

async function kindOf(promise: Promise<unknown>): Promise<string> {
  try {
    await promise;
    return 'no failure';
  } catch (error) {
    if (error instanceof Failure) return (error as Failure).detail.kind;
    throw error;
  }
}

const openDescriptors = async (): Promise<number> => (await readdir('/proc/self/fd')).length;

describe('edges of segments', () => {
  const at = 8 * MIB - 8192; // 16376 sectors are 8 MiB less a page
  const shapes: Record<string, Write[]> = {
    'runs of zeros at every edge': [
      { at: 0, count: 1, fill: 'zeros', salt: 0 },
      { at: 1, count: 3, fill: 'noise', salt: 1 },
      { at: 4, count: 1, fill: 'zeroed', salt: 0 },
      { at: 5, count: 2, fill: 'text', salt: 2 },
      { at: 4607, count: 1, fill: 'zeros', salt: 0 },
    ],
    'one run over both limits of 8 MiB': [{ at: 0, count: 4608, fill: 'text', salt: 3 }],
    'a zeroed run over both limits': [{ at: 0, count: 4608, fill: 'zeroed', salt: 3 }],
    'pages around a limit, backwards': [2, 1, 0, -1, -2].map((step) => ({
      at: at / PAGE_BYTES + step,
      count: 1,
      fill: 'noise',
      salt: step + 5,
    })),
    'the whole image stored zeros': [{ at: 0, count: 4608, fill: 'zeros', salt: 0 }],
  };
  test.each(Object.entries(shapes))('%s', async (_name, writes) => {
    for (const compression of ['none', 'lz4'] as const) {
      const spec: LayerSpec = { writes, compression, blockBytes: 16384, batchWrites: 2 };
      const virtualBytes = 18 * MIB;
      const { path } = await writeLayer({ folder, spec, unit: PAGE_BYTES, virtualBytes });
      const image = new Uint8Array(virtualBytes);
      paint(image, spec, PAGE_BYTES);
      await using stack = value(await LayerStack.open([path]));
      const got = new Uint8Array(virtualBytes).fill(7);
      value(await stack.read(bytes(0), got));
      expect(Buffer.compare(got, image)).toBe(0);
    }
  });

  test('noise takes a bounded amount more than raw when compressed', async () => {
    const writes: Write[] = [{ at: 0, count: 512, fill: 'noise', salt: 9 }];
    for (const compression of ['lz4', 'zstd'] as const) {
      const spec: LayerSpec = { writes, compression, blockBytes: 4096, batchWrites: 1 };
      const made = await writeLayer({ folder, spec, unit: PAGE_BYTES, virtualBytes: 4 * MIB });
      expect(made.sizeBytes).toBeLessThan(2 * MIB * 1.006 + 8192);
    }
  });
});

describe('many layers and many segments', () => {
  test('a stack of 255 layers reads right; 256 are refused', async () => {
    const specs = Array.from({ length: 255 }, (_, i): LayerSpec => {
      const fill = i % 7 === 3 ? 'zeroed' : 'text';
      const writes: Write[] = [{ at: (i * 5) % 64, count: 1 + (i % 9), fill, salt: i }];
      const compression = i % 5 === 0 ? 'lz4' : 'none';
      return { writes, compression, blockBytes: 4096, batchWrites: 1 };
    });
    const virtualBytes = 80 * PAGE_BYTES;
    const before = await openDescriptors();
    const chain = await writeChain({ folder, specs, unit: PAGE_BYTES, virtualBytes });
    const image = new Uint8Array(virtualBytes);
    for (const spec of specs) paint(image, spec, PAGE_BYTES);
    const paths = chain.map((layer) => layer.path);
    {
      await using stack = value(await LayerStack.open(paths, { order: 'check' }));
      const got = new Uint8Array(virtualBytes);
      value(await stack.read(bytes(0), got));
      expect(Buffer.compare(got, image)).toBe(0);
    }
    const refused = await LayerStack.open([...paths, paths[0] ?? '']);
    expect(refused).toMatchObject({ ok: false, error: { kind: 'layer-too-large' } });
    expect(await openDescriptors()).toBe(before);
  });

  /** Zeroed single pages, every `every`th from `first`. */
  const scattered = (count: number, first: number, every: number): BigUint64Array => {
    const rows = new BigUint64Array(count * 3);
    for (let i = 0; i < count; i += 1) {
      rows[3 * i] = BigInt((first + i * every) * PAGE_BYTES);
      rows[3 * i + 1] = BigInt(PAGE_BYTES);
      rows[3 * i + 2] = ZEROED_ROW;
    }
    return rows;
  };

  test('the largest index is written and opens; one segment more is refused', async () => {
    const options = newLayer(16 * GIB);
    const slab = new Uint8Array(0);
    {
      await using writer = await LayerWriter.create(options);
      await writer.append({ slab, rows: scattered(SEGMENTS_MAX, 0, 2) });
      expect((await writer.seal(never)).segmentCount).toBe(SEGMENTS_MAX);
    }
    await using stack = value(await LayerStack.open([options.path]));
    expect(stack.segmentCount).toBe(SEGMENTS_MAX);
    await using writer = await LayerWriter.create(newLayer(16 * GIB));
    await writer.append({ slab, rows: scattered(SEGMENTS_MAX + 1, 0, 2) });
    expect(await kindOf(writer.seal(never))).toBe('layer-too-many-segments');
  });

  test('indexes of four million entries in all merge within seconds', async () => {
    const paths: string[] = [];
    for (let layer = 0; layer < 8; layer += 1) {
      const options = newLayer(64 * GIB);
      await using writer = await LayerWriter.create(options);
      await writer.append({ slab: new Uint8Array(0), rows: scattered(500_000, layer, 16) });
      await writer.seal(never);
      paths.push(options.path);
    }
    const before = process.cpuUsage();
    await using stack = value(await LayerStack.open(paths));
    const { user, system } = process.cpuUsage(before);
    expect(stack.segmentCount).toBe(4_000_000);
    expect((user + system) / 1e6).toBeLessThan(5);
  });
});

describe('beyond 2 and 4 GiB', () => {
  test('compressed content of 4.5 GiB is written, merged offsets and all, and read', async () => {
    const options = newLayer(5 * GIB, 'lz4');
    const slab = new Uint8Array(4 * MIB).map((_, i) => (i >> 12) & 0xff);
    const whole = BigUint64Array.from([0n, BigInt(4 * MIB), 0n]);
    const out = new Uint8Array(compressBound('lz4', 4096, slab.length));
    const made = compressBatch({ slab, rows: whole, out, algorithm: 'lz4', blockBytes: 4096 });
    if (made === null) throw new Error('no room');
    const batches = 1152;
    {
      await using writer = await LayerWriter.create(options);
      for (let i = 0; i < batches; i += 1) {
        const rows = BigUint64Array.from([BigInt(i * 4 * MIB), BigInt(4 * MIB), 0n]);
        await writer.append({ slab, rows, compressed: made });
      }
      expect((await writer.seal(never)).dataBytes).toBe(4.5 * GIB);
    }
    await using stack = value(await LayerStack.open([options.path]));
    const page = new Uint8Array(PAGE_BYTES);
    for (const at of [0, 2 * GIB - 4096, 2 * GIB, 4 * GIB - 4096, 4 * GIB, 4.5 * GIB - 4096]) {
      value(await stack.read(bytes(at), page));
      const expected = ((at / PAGE_BYTES) % 1024) & 0xff;
      expect([at, page[0], page[4095]]).toEqual([at, expected, expected]);
    }
  });

  test('a raw layer whose data lies beyond 4 GiB is read and verified', async () => {
    // Made by hand, sparse: the writer of a real one would take minutes of disk time in CI.
    const small = newLayer(8 * GIB);
    const slab = noise(8, 8192);
    {
      await using writer = await LayerWriter.create(small);
      const rows = BigUint64Array.from([BigInt(6 * GIB), 4096n, 0n, 0n, 4096n, 4096n]);
      await writer.append({ slab, rows });
      await writer.seal(never);
    }
    const path = join(folder, 'large');
    const moved = 5 * GIB;
    await using from = await open(small.path, 'r');
    await using to = await open(path, 'w+');
    const { size } = await from.stat();
    const content = Buffer.alloc(size);
    await from.read(content, 0, size, 0);
    await to.write(content.subarray(0, 4096), 0, 4096, 0);
    content.writeBigUInt64LE(BigInt(4096 + 8192 + moved), size - 4096 + 32);
    const index = 4096 + 8192;
    for (const entry of [0, 1]) {
      const word = content.readBigUInt64LE(index + entry * 16 + 8);
      content.writeBigUInt64LE(word + BigInt(moved / 512), index + entry * 16 + 8);
    }
    await to.write(content.subarray(4096), 0, size - 4096, 4096 + moved);
    await using stack = value(await LayerStack.open([path]));
    const page = new Uint8Array(4096);
    value(await stack.read(bytes(6 * GIB), page));
    expect(Buffer.compare(page, slab.subarray(0, 4096))).toBe(0);
    value(await stack.read(bytes(0), page));
    expect(Buffer.compare(page, slab.subarray(4096))).toBe(0);
    expect(stack.layers[0]?.sizeBytes).toBe(size + moved);
  });

  test.runIf(process.env['VARVE_BIG'] === '1')(
    '4.5 GiB of raw data, really written',
    async () => {
      const options = newLayer(5 * GIB);
      const slab = noise(11, 4 * MIB);
      await using writer = await LayerWriter.create(options);
      for (let i = 0; i < 1152; i += 1) {
        const rows = BigUint64Array.from([BigInt(i * 4 * MIB), BigInt(4 * MIB), 0n]);
        await writer.append({ slab, rows });
      }
      const sealed = await writer.seal(never);
      const sum = execFileSync('sha256sum', [options.path], { encoding: 'utf8' });
      expect(sealed.digest).toBe(`sha256:${sum.slice(0, 64)}`);
      await using stack = value(await LayerStack.open([options.path]));
      const page = new Uint8Array(4096);
      value(await stack.read(bytes(4.5 * GIB - 4096), page));
      expect(Buffer.compare(page, slab.subarray(-4096))).toBe(0);
    },
    300_000,
  );
});

describe('a disk that is full', () => {
  /** Largest file that this process may write; EFBIG instead of ENOSPC, the same path in us. */
  const limitFiles = (size: string): void => {
    execFileSync('prlimit', ['--pid', String(process.pid), `--fsize=${size}:`]);
  };
  afterEach(() => limitFiles('unlimited'));

  test('fails the append, poisons the writer, leaves nothing; later it works', async () => {
    const options = newLayer(16 * MIB);
    const slab = noise(2, MIB);
    const batch = (at: number) => ({
      slab,
      rows: BigUint64Array.from([BigInt(at * MIB), BigInt(MIB), 0n]),
    });
    {
      await using writer = await LayerWriter.create(options);
      await writer.append(batch(0));
      limitFiles(String(3 * MIB));
      await writer.append(batch(1));
      const failed = [writer.append(batch(2)), writer.append(batch(3))];
      const kinds = await Promise.all(failed.map(kindOf));
      expect(kinds).toEqual(['layer-no-space', 'layer-poisoned']);
      limitFiles('unlimited');
      expect(await kindOf(writer.append(batch(4)))).toBe('layer-poisoned');
      expect(await kindOf(writer.seal(never))).toBe('layer-poisoned');
    }
    expect(await readdir(folder)).toEqual([]);
    await using writer = await LayerWriter.create(options);
    await writer.append(batch(0));
    await writer.seal(never);
    expect((await stat(options.path)).size).toBe(MIB + 3 * 4096);
  });

  test('fails the seal where only the index does not fit', async () => {
    {
      await using writer = await LayerWriter.create(newLayer(16 * MIB));
      const rows = BigUint64Array.from([0n, BigInt(MIB), 0n]);
      await writer.append({ slab: noise(2, MIB), rows });
      limitFiles(String(MIB + 4096 + 100));
      expect(await kindOf(writer.seal(never))).toBe('layer-no-space');
    }
    expect(await readdir(folder)).toEqual([]);
  });
});

describe('threads', () => {
  test('a worker compares, reads and compresses; after disposal it is told so', async () => {
    const stack = value(await LayerStack.open([vectorPath('lz4.commit')]));
    const image = new Uint8Array(new SharedArrayBuffer(stack.virtualBytes));
    value(await stack.read(bytes(0), image));
    const script = new URL('./stack-worker.mjs', import.meta.url);
    const worker = new Worker(script, { workerData: { shared: stack.shared(), image } });
    const next = () => new Promise((resolve) => worker.once('message', resolve));
    expect(await next()).toEqual({ equalPages: 512, same: true, blocks: 512 });
    await stack[Symbol.asyncDispose]();
    const told = next();
    worker.postMessage('again');
    expect(await told).toBe('layer-closed');
    await worker.terminate();
  });

  test('descriptors close once, at disposal', async () => {
    const before = await openDescriptors();
    const stack = value(await LayerStack.open([vectorPath('raw.commit')]));
    expect(await openDescriptors()).toBe(before + 1);
    const reads = Array.from({ length: 8 }, () => stack.read(bytes(0), new Uint8Array(MIB)));
    await stack[Symbol.asyncDispose]();
    await Promise.all(reads);
    await stack[Symbol.asyncDispose]();
    expect(await openDescriptors()).toBe(before);
    const shared = stack.shared();
    const after = readStackNow(shared, bytes(0), new Uint8Array(512));
    expect(after).toMatchObject({ ok: false, error: { kind: 'layer-closed' } });
  });
});
