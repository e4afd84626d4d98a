import { createHash } from 'node:crypto';
import { mkdtemp, readFile, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { flattenStack } from '../../src/layer/flatten.ts';
import { LayerStack } from '../../src/layer/layer-stack.ts';
import { bytes } from '../../src/units.ts';
import { value, vectorPath, vectors } from './support.ts';

let folder: string;
beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), 'varve-vectors-'));
});
afterAll(() => rm(folder, { recursive: true, force: true }));

const sha256 = (data: Uint8Array): string => createHash('sha256').update(data).digest('hex');

describe('layers written by the reference', () => {
  test.each(vectors.layers)('$file reads back to its hash', async (vector) => {
    await using stack = value(await LayerStack.open([vectorPath(vector.file)]));
    const [layer] = stack.layers;
    expect(layer?.uuid).toBe(vector.uuid);
    expect(layer?.parentUuid).toBe(vector.parentUuid);
    expect(layer?.sizeBytes).toBe(vector.bytes);
    expect(stack.virtualBytes).toBe(vector.virtualSize);
    const image = new Uint8Array(stack.virtualBytes);
    value(await stack.read(bytes(0), image));
    expect(sha256(image)).toBe(vector.flatSha256);
  });

  test.each(vectors.layers)('$file flattens to its hash', async (vector) => {
    await using stack = value(await LayerStack.open([vectorPath(vector.file)]));
    const path = join(folder, `${vector.file}.flat`);
    value(await flattenStack(stack, { path, signal: AbortSignal.timeout(30_000) }));
    expect(sha256(await readFile(path))).toBe(vector.flatSha256);
  });
});

describe('stacks of the reference', () => {
  test.each(vectors.stacks)('$bottomToTop reads back to its hash', async (vector) => {
    await using stack = value(await LayerStack.open(vector.bottomToTop.map(vectorPath)));
    expect(stack.virtualBytes).toBe(vector.virtualSize);
    const image = new Uint8Array(stack.virtualBytes);
    value(await stack.read(bytes(0), image));
    expect(sha256(image)).toBe(vector.flatSha256);
  });

  test('a broken uuid order is refused when asked for, and named', async () => {
    const paths = ['raw.commit', 'zstd.commit'].map(vectorPath);
    const opened = await LayerStack.open(paths, { order: 'check' });
    expect(opened).toMatchObject({ ok: false, error: { kind: 'layer-chain-broken' } });
    await using right = value(
      await LayerStack.open(['raw.commit', 'lz4.commit', 'zstd.commit'].map(vectorPath), {
        order: 'check',
      }),
    );
    expect(right.layers).toHaveLength(3);
  });
});
