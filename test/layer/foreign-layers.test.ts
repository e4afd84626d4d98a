/** Layers as other writers make them. */
import { copyFile, mkdtemp, readFile, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, test } from 'vitest';
import { LayerStack, uuidOrNull } from '../../src/layer/layer-stack.ts';
import { bytes } from '../../src/units.ts';
import { varve } from '../cli/run.ts';
import { value, vectorPath } from './support.ts';

let folder: string;
beforeEach(async () => {
  folder = await mkdtemp(join(tmpdir(), 'varve-foreign-'));
});
afterEach(() => rm(folder, { recursive: true, force: true }));

async function image(path: string): Promise<Buffer> {
  await using stack = value(await LayerStack.open([path], { order: 'ignore' }));
  const read = Buffer.alloc(stack.virtualBytes);
  value(await stack.read(bytes(0), read));
  return read;
}

/** One tar header, with its checksum. */
function header(name: string, type: string, size: number): Buffer {
  const block = Buffer.alloc(512);
  block.write(name, 0, 'latin1');
  block.write('0000644\0', 100, 'latin1');
  block.write(`${size.toString(8).padStart(11, '0')}\0`, 124, 'latin1');
  block.fill(' ', 148, 156);
  block.write(type, 156, 'latin1');
  block.write('ustar\u000000', 257, 'latin1');
  const sum = block.reduce((total, byte) => total + byte, 0);
  block.write(`${sum.toString(8).padStart(6, '0')}\0 `, 148, 'latin1');
  return block;
}

const record = (key: string, text: string): string => {
  const rest = ` ${key}=${text}\n`;
  let length = rest.length + 1;
  while (`${length}${rest}`.length !== length) length = `${length}${rest}`.length;
  return `${length}${rest}`;
};

test.each([
  ['PaxHeaders.0/overlaybd.commit', ['mtime', 'size']],
  ['././@PaxHeader', ['size']],
  ['a', ['comment', 'size', 'mtime']],
])('a tar wrapper whose pax header is called %s opens', async (name, keys) => {
  const body = await readFile(vectorPath('lz4.commit'));
  const values: Record<string, string> = {
    size: String(body.length),
    mtime: '1700000000.123456789',
    comment: 'x'.repeat(600),
  };
  const records = Buffer.from(keys.map((key) => record(key, values[key] ?? '')).join(''));
  const padded = Buffer.alloc(Math.ceil(records.length / 512) * 512);
  records.copy(padded);
  const path = join(folder, 'wrapped');
  const parts = [header(name, 'x', records.length), padded, header('overlaybd.commit', '0', 0)];
  await writeFile(path, Buffer.concat([...parts, body, Buffer.alloc(1024)]));
  expect((await image(path)).equals(await image(vectorPath('lz4.commit')))).toBe(true);
});

test('a layer on a base without a UUID names no parent, and the two open as a chain', async () => {
  const base = join(folder, 'base');
  await copyFile(vectorPath('raw.commit'), base);
  const file = await readFile(base);
  const nil = '00000000-0000-0000-0000-000000000000';
  for (const at of [56, file.length - 4096 + 56]) file.write(nil, at, 'latin1');
  await writeFile(base, file);
  const raw = join(folder, 'raw');
  await writeFile(raw, await image(base));
  const child = join(folder, 'child');
  const made = await varve(['layer', 'create', raw, '--parent', base, '--output', child]);
  expect([made.code, made.stderr]).toEqual([0, '']);
  await using stack = value(await LayerStack.open([base, child]));
  const [bottom, top] = stack.layers;
  expect(uuidOrNull(bottom?.uuid ?? '')).toBeNull();
  expect(top?.parentUuid).toBeNull();
});
