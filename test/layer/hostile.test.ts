import { execFileSync } from 'node:child_process';
import { copyFile, mkdtemp, readFile, rename, rm, truncate, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, test } from 'vitest';
import { LayerStack } from '../../src/layer/layer-stack.ts';
import { verifyLayers } from '../../src/layer/verify.ts';
import { crc32c } from '../../src/native/guest.ts';
import { bytes, digest, MIB } from '../../src/units.ts';
import { noise, writeLayer } from './images.ts';
import type { LayerSpec } from './images.ts';
import { value, vectorPath, vectors } from './support.ts';

let folder: string;
beforeEach(async () => {
  folder = await mkdtemp(join(tmpdir(), 'varve-hostile-'));
});
afterEach(() => rm(folder, { recursive: true, force: true }));

const never = new AbortController().signal;

/** `sound`, or the kind of the failure to open. */
async function opened(path: string): Promise<string> {
  const stack = await LayerStack.open([path]);
  if (!stack.ok) return stack.error.kind;
  await stack.value[Symbol.asyncDispose]();
  return 'sound';
}

async function openedBytes(content: Uint8Array): Promise<string> {
  const path = join(folder, 'probe');
  await writeFile(path, content);
  return opened(path);
}

const whole = ['raw.commit', 'raw-sealed.commit', 'lz4.commit', 'lz4-trailer-only.commit'];

describe('a layer that is not whole', () => {
  test.each([...whole, 'empty.commit'])('%s cut anywhere is refused', async (file) => {
    const content = await readFile(vectorPath(file));
    const { length } = content;
    const edges = [0, 1, 23, 24, 511, 512, 513, 4095, 4096, 4097, 8191, length >> 1];
    const fromEnd = [8193, 8192, 4097, 4096, 4095, 1024, 513, 512, 511, 4, 1];
    const sizes = [...edges, ...fromEnd.map((left) => length - left)];
    for (const size of sizes.filter((at) => at >= 0 && at < length)) {
      const kind = await openedBytes(content.subarray(0, size));
      expect([size, kind]).not.toEqual([size, 'sound']);
      const expected = ['layer-truncated', 'layer-unsealed', 'layer-not-a-layer'];
      if (size < 512) expect(expected).toContain(kind);
    }
  });

  test('a tar whose body is cut is refused; without its end blocks it is whole', async () => {
    const content = await readFile(vectorPath('raw-tar.commit'));
    expect(await openedBytes(content.subarray(0, 1536 + 106_496))).toBe('sound');
    for (const size of [512, 1024, 1535, 1536, 4096, 1536 + 106_495]) {
      expect(await openedBytes(content.subarray(0, size))).not.toBe('sound');
    }
  });

  test.each(whole)('%s with bytes after its end is refused', async (file) => {
    const content = await readFile(vectorPath(file));
    for (const count of [1, 511, 512, 4096, MIB]) {
      const kind = await openedBytes(Buffer.concat([content, Buffer.alloc(count)]));
      expect([count, kind]).not.toEqual([count, 'sound']);
    }
  });

  test('a second layer glued on is never read in place of the first', async () => {
    for (const first of whole) {
      for (const second of whole) {
        const parts = [first, second].map((file) => readFile(vectorPath(file)));
        const kind = await openedBytes(Buffer.concat(await Promise.all(parts)));
        expect([first, second, kind]).not.toEqual([first, second, 'sound']);
      }
    }
  });

  test('files that are no sealed layers are named as what they are', async () => {
    expect(await openedBytes(new Uint8Array(0))).toBe('layer-not-a-layer');
    expect(await openedBytes(noise(1, 20_000))).toBe('layer-not-a-layer');
    const sealedInPlace = await readFile(vectorPath('raw-sealed.commit'));
    const unsealed = sealedInPlace.subarray(0, sealedInPlace.length - 4096);
    expect(await openedBytes(unsealed)).toBe('layer-unsealed');
    expect(await openedBytes(unsealed.subarray(0, 4096))).toBe('layer-unsealed');
    expect(await opened(folder)).toBe('layer-not-a-layer');
    expect(await opened(join(folder, 'nothing'))).toBe('layer-missing');
    const pipe = join(folder, 'pipe');
    execFileSync('mkfifo', [pipe]);
    expect(await opened(pipe)).toBe('layer-not-a-layer');
    await writeFile(join(folder, 'text'), 'hello');
    execFileSync('tar', ['-C', folder, '-cf', join(folder, 'tar'), 'text']);
    expect(await opened(join(folder, 'tar'))).not.toBe('sound');
  });
});

/** Rewrites 64-bit fields of a block. */
function patched(
  content: Uint8Array,
  at: number,
  fields: Readonly<Record<number, bigint>>,
): Buffer {
  const copy = Buffer.from(content);
  for (const [offset, field] of Object.entries(fields)) {
    copy.writeBigUInt64LE(field, at + Number(offset));
  }
  return copy;
}

/** Recomputes the digest of a ZFile header. */
function resealed(content: Buffer, at = 0): Buffer {
  content.writeUInt32LE(0, at + 28);
  content.writeUInt32LE(crc32c(content.subarray(at, at + 512), 0), at + 28);
  return content;
}

/** Opens a hostile file and holds it to its budget of processor time and memory. */
async function cheapFailure(content: Uint8Array): Promise<string> {
  const path = join(folder, 'probe');
  await writeFile(path, content);
  const rssBefore = process.memoryUsage.rss();
  const before = process.cpuUsage();
  const kind = await opened(path);
  const { user, system } = process.cpuUsage(before);
  expect((user + system) / 1000).toBeLessThan(100);
  expect(process.memoryUsage.rss() - rssBefore).toBeLessThan(64 * MIB);
  return kind;
}

describe('hostile numbers cost little', () => {
  const big = [2n ** 20n, 10_000_000n, 2n ** 32n - 1n, 2n ** 52n, 2n ** 60n, 2n ** 64n - 1n];

  test('in an LSMT trailer', async () => {
    const content = await readFile(vectorPath('raw.commit'));
    const at = content.length - 4096;
    for (const number of big) {
      for (const field of [32, 40]) {
        const kind = await cheapFailure(patched(content, at, { [field]: number }));
        expect(kind).toMatch(/layer-(corrupt|too-large)/);
      }
      const kind = await cheapFailure(patched(content, at, { 48: number }));
      expect(kind).toBe(number < 2n ** 53n ? 'sound' : 'layer-too-large');
    }
  });

  test('in LSMT index entries', async () => {
    const content = await readFile(vectorPath('raw.commit'));
    const index = 110_592;
    const entries: [bigint, bigint][] = [
      [0n, 0n], // moffset in the header
      [(16383n << 50n) | 1n, 8n], // longer than the data
      [(1n << 50n) | (2n ** 50n - 2n), 2n ** 55n - 1n],
      [8n << 50n, 2n ** 54n],
      [8n << 50n, 2n ** 55n], // zeroed, moffset 0
    ];
    for (const [word0, word1] of entries) {
      const kind = await cheapFailure(patched(content, index, { 0: word0, 8: word1 }));
      expect(kind).toBe('layer-corrupt');
    }
    const disordered = Buffer.from(content);
    content.copy(disordered, index + 16, index, index + 16);
    expect(await cheapFailure(disordered)).toBe('layer-corrupt');
  });

  test('in a ZFile header', async () => {
    const content = await readFile(vectorPath('lz4.commit'));
    for (const number of big) {
      for (const field of [40, 48, 56]) {
        const kind = await cheapFailure(resealed(patched(content, 0, { [field]: number })));
        expect(kind).toMatch(/layer-(corrupt|too-large|truncated)/);
      }
    }
    for (const [at, byte] of [
      [74, 2],
      [72, 1],
      [76, 9],
      [76, 0],
      [78, 1],
    ] as const) {
      const copy = Buffer.from(content);
      copy.writeUInt8(byte, at);
      expect(await cheapFailure(resealed(copy))).toBe('layer-unsupported');
    }
  });

  test('in a jump table', async () => {
    const content = await readFile(vectorPath('lz4.commit'));
    const table = Number(content.readBigUInt64LE(40));
    for (const length of [0, 1, 4, 131_073, 2 ** 31, 2 ** 32 - 1]) {
      const copy = Buffer.from(content);
      copy.writeUInt32LE(length, table);
      const crc = crc32c(copy.subarray(table, copy.length - 512), 0);
      copy.writeUInt32LE(crc, 64);
      expect(await cheapFailure(resealed(copy))).toBe('layer-corrupt');
    }
  });

  test('blocks that unpack to more than they may', async () => {
    const content = await readFile(vectorPath('zstd-bs32k.commit'));
    const copy = Buffer.from(content);
    copy.writeUInt32LE(4096, 72);
    copy.writeBigUInt64LE(3n * 4096n, 56);
    expect(await cheapFailure(resealed(copy))).toBe('layer-corrupt');
  });
});

const smallLayer = (compression: LayerSpec['compression']): LayerSpec => ({
  compression,
  blockBytes: 4096,
  batchWrites: 9,
  writes: [
    { at: 0, count: 1, fill: 'text', salt: 1 },
    { at: 5, count: 1, fill: 'zeroed', salt: 0 },
    { at: 9, count: 1, fill: 'noise', salt: 3 },
  ],
});

describe('a flipped bit', () => {
  // Every bit of every byte is flipped natively: native/test/layer_test.cpp.
  test.each(['lz4', 'zstd'] as const)('in a %s layer is found by its checksums', async (codec) => {
    const options = { folder, spec: smallLayer(codec), unit: 4096, virtualBytes: MIB };
    const { path } = await writeLayer(options);
    const content = await readFile(path);
    const probe = join(folder, 'probe');
    const step = 11;
    for (let at = 0; at < content.length; at += step) {
      const copy = Buffer.from(content);
      copy.writeUInt8(copy.readUInt8(at) ^ (1 << (at % 8)), at);
      await writeFile(probe, copy);
      const report = await verifyLayers({ paths: [probe], signal: never });
      expect([at, report.sound]).toEqual([at, false]);
    }
  });

  test('in a raw layer is found by its digest', async () => {
    const options = { folder, spec: smallLayer('none'), unit: 4096, virtualBytes: MIB };
    const sealed = await writeLayer(options);
    const content = await readFile(sealed.path);
    const probe = join(folder, 'probe');
    for (let at = 0; at < content.length; at += 97) {
      const copy = Buffer.from(content);
      copy.writeUInt8(copy.readUInt8(at) ^ (1 << (at % 8)), at);
      await writeFile(probe, copy);
      const digests = [digest(sealed.digest)];
      const report = await verifyLayers({ paths: [probe], digests, signal: never });
      expect([at, report.sound]).toEqual([at, false]);
    }
  });

  test('in one layer of a chain is pinned to it, and reads never return its block', async () => {
    const paths = ['raw.commit', 'lz4.commit', 'zstd.commit'].map(vectorPath);
    const bad = join(folder, 'bad');
    await copyFile(paths[1] ?? '', bad);
    const content = await readFile(bad);
    const at = 512 + content.readUInt32LE(Number(content.readBigUInt64LE(40))) + 20; // block 1
    content.writeUInt8(content.readUInt8(at) ^ 16, at);
    await writeFile(bad, content);
    const chain = [paths[0] ?? '', bad, paths[2] ?? ''];
    const report = await verifyLayers({ paths: chain, signal: never });
    expect(report.layers.map((layer) => layer.findings.length)).toEqual([0, 1, 0]);
    expect(report.layers[1]?.findings[0]).toMatchObject({ kind: 'layer-checksum', path: bad });
    await using stack = value(await LayerStack.open([bad]));
    const image = new Uint8Array(stack.virtualBytes);
    expect(await stack.read(bytes(0), image)).toMatchObject({
      ok: false,
      error: { kind: 'layer-checksum', path: bad },
    });
  });
});

describe('an open stack', () => {
  test('keeps the file it opened when another takes its name; a new one reads that', async () => {
    const path = join(folder, 'layer');
    await copyFile(vectorPath('raw.commit'), path);
    await using stack = value(await LayerStack.open([path]));
    const before = new Uint8Array(stack.virtualBytes);
    value(await stack.read(bytes(0), before));
    await copyFile(vectorPath('lz4.commit'), `${path}.new`);
    await rename(`${path}.new`, path);
    const after = new Uint8Array(stack.virtualBytes);
    value(await stack.read(bytes(0), after));
    expect(Buffer.compare(before, after)).toBe(0);
    await using fresh = value(await LayerStack.open([path]));
    expect(fresh.layers[0]?.uuid).toBe(vectors.layers[1]?.uuid);
    value(await fresh.read(bytes(0), after));
    expect(Buffer.compare(before, after)).not.toBe(0);
  });

  test('fails, and says where, when its file becomes shorter', async () => {
    const path = join(folder, 'layer');
    await copyFile(vectorPath('raw.commit'), path);
    await using stack = value(await LayerStack.open([path]));
    await truncate(path, 8192);
    const image = new Uint8Array(stack.virtualBytes);
    const read = await stack.read(bytes(0), image);
    expect(read).toMatchObject({ ok: false, error: { kind: 'layer-truncated', path } });
  });
});
