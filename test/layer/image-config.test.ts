import { mkdtemp, readdir, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import fc from 'fast-check';
import { afterEach, beforeEach, expect, test } from 'vitest';
import {
  exportImageConfig,
  lowerPaths,
  parseImageConfig,
  readImageConfig,
} from '../../src/layer/image-config.ts';
import { bytes, digest, layerUuid } from '../../src/units.ts';
import { value } from './support.ts';

const seed = Number(process.env['SEED'] ?? Date.now() % 2 ** 31);
/** `npm run test:fuzz` sets this: how long to feed the parser. */
const fuzzSeconds = Number(process.env['FUZZ_SECONDS'] ?? 1);
console.log(`image config: SEED=${seed} FUZZ_SECONDS=${fuzzSeconds}`);

let folder: string;
beforeEach(async () => {
  folder = await mkdtemp(join(tmpdir(), 'varve-config-'));
});
afterEach(() => rm(folder, { recursive: true, force: true }));

const layer = (name: string) => ({
  path: join(folder, name),
  digest: digest(`sha256:${'ab'.repeat(32)}`),
  sizeBytes: bytes(8192),
  uuid: layerUuid('0A0B0C0D-1111-4222-8333-000001000000'),
});

test('a config reads back as it was written, with absolute paths, which the reference needs', async () => {
  const path = join(folder, 'mem_image.json');
  const layers = ['a', 'sub/b'].map(layer);
  value(await exportImageConfig({ layers, path }));
  const config = value(await readImageConfig(path));
  expect(config.lowers.map((lower) => lower.file)).toEqual(layers.map((l) => l.path));
  expect(lowerPaths(config, path)).toEqual(layers.map((l) => l.path));
  expect(await readdir(folder)).toEqual(['mem_image.json']);
});

test('256 layers are listed, 257 refused, and nothing is written then', async () => {
  const path = join(folder, 'config');
  const most = Array.from({ length: 256 }, (_, i) => layer(`l${i}`));
  expect(value(await exportImageConfig({ layers: most, path })).lowers).toHaveLength(256);
  await rm(path);
  const refused = await exportImageConfig({ layers: [...most, layer('more')], path });
  expect(refused).toMatchObject({ ok: false, error: { kind: 'layer-too-large' } });
  expect(await readdir(folder)).toEqual([]);
});

test('a folder and a digest name a layer too; a folder alone does not', () => {
  const blob = `sha256:${'0'.repeat(64)}`;
  const good = { lowers: [{ dir: '/blobs', digest: blob }], upper: {} };
  const parsed = value(parseImageConfig(JSON.stringify(good), '/etc/config.json'));
  expect(lowerPaths(parsed, '/etc/config.json')).toEqual(['/blobs/overlaybd.commit']);
  const bad = { lowers: [{ dir: '/blobs' }] };
  expect(parseImageConfig(JSON.stringify(bad), 'x').ok).toBe(false);
});

test('a config that is missing, huge or no JSON is an error', async () => {
  const path = join(folder, 'config');
  expect(await readImageConfig(path)).toMatchObject({ error: { kind: 'layer-missing' } });
  await writeFile(path, '{ "lowers": [');
  expect(await readImageConfig(path)).toMatchObject({ error: { kind: 'layer-corrupt' } });
  await writeFile(path, ' '.repeat(5 * 1024 * 1024));
  expect(await readImageConfig(path)).toMatchObject({ error: { kind: 'layer-corrupt' } });
});

/** Texts near a real config: values replaced, keys dropped, characters changed. */
const nearConfig = fc
  .record({
    lowers: fc.oneof(
      fc.array(
        fc.record(
          {
            file: fc.oneof(fc.string(), fc.anything()),
            dir: fc.string(),
            digest: fc.oneof(fc.constant(`sha256:${'0'.repeat(64)}`), fc.string()),
            size: fc.oneof(fc.double(), fc.integer(), fc.constant(2 ** 63)),
            uuid: fc.anything(),
          },
          { requiredKeys: [] },
        ),
        { maxLength: 300 },
      ),
      fc.anything(),
    ),
    upper: fc.anything(),
    __proto__: fc.anything(),
  })
  .map((config) => {
    try {
      return JSON.stringify(config, (_, v: unknown) => (typeof v === 'bigint' ? String(v) : v));
    } catch {
      return '{}';
    }
  });

const texts = fc.oneof(
  nearConfig,
  fc.string({ maxLength: 400 }),
  fc.json(),
  fc
    .tuple(nearConfig, fc.nat(), fc.string({ maxLength: 2 }))
    .map(([text, at, put]) => text.slice(0, at % (text.length + 1)) + put + text.slice(at % 97)),
);

test('any text is a config or an error, and a config has usable layers', () => {
  let count = 0;
  const property = fc.property(texts, (text) => {
    count += 1;
    const parsed = parseImageConfig(text, '/etc/config.json');
    if (!parsed.ok) {
      expect(parsed.error.message.length).toBeGreaterThan(0);
      return;
    }
    expect(parsed.value.lowers.length).toBeLessThanOrEqual(256);
    for (const path of lowerPaths(parsed.value, '/etc/config.json')) expect(path).toMatch(/^\//);
  });
  const limit = fc.interruptAfterTimeLimit(fuzzSeconds * 1000, { failOnInterrupt: false });
  fc.assert(property, { seed, numRuns: 100_000_000, plugins: [limit] });
  console.log(`image config: ${count} texts`);
}, 120_000);
