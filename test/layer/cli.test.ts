import { execFileSync } from 'node:child_process';
import { mkdtemp, open, readdir, readFile, rm, stat, truncate, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { Command } from 'commander';
import { afterEach, beforeEach, describe, expect, test } from 'vitest';
import { layerCommand } from '../../src/cli/layer.ts';
import { lowerPaths, readImageConfig } from '../../src/layer/image-config.ts';
import { Failure } from '../../src/result.ts';
import { MIB } from '../../src/units.ts';
import { noise } from './images.ts';
import { value, vectorPath, vectors } from './support.ts';

let folder: string;
beforeEach(async () => {
  folder = await mkdtemp(join(tmpdir(), 'varve-cli-'));
});
afterEach(() => rm(folder, { recursive: true, force: true }));

interface Ran {
  readonly out: string;
  readonly err: string;
  readonly exitCode: number;
  readonly failure: string | null;
}

async function varve(args: readonly string[], signal = AbortSignal.timeout(60_000)): Promise<Ran> {
  let out = '';
  let err = '';
  let exitCode = 0;
  const io = {
    out: (text: string) => (out += text),
    err: (text: string) => (err += text),
    interactive: true,
    signal,
    setExitCode: (code: number) => (exitCode = code),
  };
  const program = new Command('varve').option('--json').exitOverride();
  program.addCommand(layerCommand(() => io));
  try {
    await program.parseAsync(['layer', ...args], { from: 'user' });
    return { out, err, exitCode, failure: null };
  } catch (error) {
    if (error instanceof Failure) {
      return { out, err, exitCode: 1, failure: (error as Failure).detail.kind };
    }
    throw error;
  }
}

async function json(args: readonly string[]): Promise<Record<string, unknown>> {
  const ran = await varve([...args, '--json']);
  expect(ran.failure).toBe(null);
  return JSON.parse(ran.out) as Record<string, unknown>;
}

/** 12 MiB: noise, a hole, text over the 8 MiB boundary, a last page. */
async function rawFile(): Promise<string> {
  const path = join(folder, 'raw');
  await using file = await open(path, 'w');
  await file.truncate(12 * MIB);
  await file.write(noise(3, 300_000), 0, undefined, 0);
  await file.write(Buffer.alloc(100_000, 'text '), 0, undefined, 8 * MIB - 50_000);
  await file.write(noise(4, 4096), 0, undefined, 12 * MIB - 4096);
  return path;
}

describe('layer create, inspect, verify and export', () => {
  test.each(['none', 'lz4', 'zstd'])('%s gives the raw file back', async (compression) => {
    const raw = await rawFile();
    const layer = join(folder, 'layer');
    const flat = join(folder, 'flat');
    const made = await json(['create', raw, '--output', layer, '--compression', compression]);
    expect(made['virtualBytes']).toBe(12 * MIB);
    expect(Number(made['dataBytes'])).toBeLessThan(MIB);
    const inspected = (await json(['inspect', layer])) as { layers: { compression: string }[] };
    expect(inspected.layers[0]?.compression).toBe(compression);
    const verified = await json(['verify', layer]);
    expect(verified['sound']).toBe(true);
    await json(['export', '--output', flat, layer]);
    expect(Buffer.compare(await readFile(flat), await readFile(raw))).toBe(0);
    const blocks = (await stat(flat)).blocks * 512;
    expect(blocks).toBeLessThan(2 * MIB); // sparse
  });

  test('block size, uuid and parent are written; the text form names them', async () => {
    const raw = await rawFile();
    const layer = join(folder, 'layer');
    const uuid = 'ABCDEF01-0000-4000-8000-0123456789AB';
    const options = ['--compression', 'zstd', '--block-size', '32KiB', '--uuid', uuid];
    const parent = vectorPath('raw.commit');
    await varve(['create', raw, '--output', layer, ...options, '--parent', parent]);
    const { out } = await varve(['inspect', layer]);
    expect(out).toContain('uuid        abcdef01-0000-4000-8000-0123456789ab');
    expect(out).toContain('parent      0a0b0c0d-1111-4222-8333-000001000000');
    expect(out).toContain('zstd, 32768-byte blocks with CRCs');
  });

  test('wrong options are usage errors', async () => {
    const wrong = [
      ['create', 'raw', '--output', 'x', '--block-size', '65536'],
      ['create', 'raw', '--output', 'x', '--uuid', 'no'],
      ['create', 'raw', '--output', 'x', '--compression', 'gzip'],
      ['export', vectorPath('raw.commit')],
      ['merge', vectorPath('raw.commit')],
    ];
    for (const args of wrong) await expect(varve(args)).rejects.toThrow(/error|option|argument/);
  });
});

test('verify names layer, offset and field, and ends with 1', async () => {
  const bad = join(folder, 'bad');
  const bytes = await readFile(vectorPath('lz4.commit'));
  bytes.writeUInt8(bytes.readUInt8(2000) ^ 4, 2000);
  await writeFile(bad, bytes);
  const ran = await varve(['verify', vectorPath('raw.commit'), bad]);
  expect(ran.exitCode).toBe(1);
  expect(ran.out).toMatch(/bad fails a checksum: zfile.block at byte \d+/);
  const order = await varve(['verify', vectorPath('zstd.commit'), vectorPath('raw.commit')]);
  expect(order.exitCode).toBe(1);
  expect(order.out).toContain('[layer-chain-broken]');
});

test('merge keeps the image of every reference stack', async () => {
  for (const [at, stack] of vectors.stacks.entries()) {
    const paths = stack.bottomToTop.map(vectorPath);
    const output = join(folder, `merged-${at}`);
    const args = ['merge', '--output', output, '--compression', 'lz4', ...paths];
    // Only the first stack's parents are in order.
    expect((await varve(args)).failure).toBe(at === 0 ? null : 'layer-chain-broken');
    if (at > 0) await json([...args, '--any-order']);
    await json(['export', '--output', `${output}.flat`, output]);
    const sum = execFileSync('sha256sum', [`${output}.flat`], { encoding: 'utf8' });
    expect(sum.slice(0, 64)).toBe(stack.flatSha256);
  }
});

test('an image config lists layers by absolute paths, and reads back', async () => {
  const paths = ['raw.commit', 'lz4.commit', 'zstd.commit'].map(vectorPath);
  const config = join(folder, 'mem_image.json');
  await json(['export', '--image-config', config, ...paths]);
  const read = value(await readImageConfig(config));
  expect(lowerPaths(read, config)).toEqual(paths);
  expect(read.lowers[1]?.digest).toBe(`sha256:${vectors.layers[1]?.sha256 ?? ''}`);
  const own = join(folder, 'own.json');
  const local = join(folder, 'local');
  await writeFile(local, await readFile(paths[0] ?? ''));
  await json(['export', '--image-config', own, local]);
  expect(value(await readImageConfig(own)).lowers[0]?.file).toBe(local);
});

test('nothing is overwritten, and an interrupt leaves nothing', async () => {
  const raw = await rawFile();
  const taken = join(folder, 'taken');
  await writeFile(taken, 'precious');
  for (const args of [
    ['create', raw, '--output', taken],
    ['export', '--output', taken, vectorPath('raw.commit')],
    ['merge', '--output', taken, vectorPath('raw.commit')],
  ]) {
    expect((await varve(args)).failure).toBe('layer-exists');
  }
  expect(await readFile(taken, 'utf8')).toBe('precious');
  const stopped = await varve(['create', raw, '--output', `${taken}2`], AbortSignal.abort());
  expect(stopped.failure).toBe('layer-cancelled');
  await truncate(raw, 12 * MIB + 1);
  expect((await varve(['create', raw, '--output', `${taken}2`])).failure).toBe('layer-unsupported');
  expect((await varve(['inspect', join(folder, 'none')])).failure).toBe('layer-missing');
  expect((await readdir(folder)).sort()).toEqual(['raw', 'taken']);
});
