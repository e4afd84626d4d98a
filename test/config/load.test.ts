import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { inspect } from 'node:util';
import { afterAll, expect, test } from 'vitest';
import { catalogUrl, configOf, loadConfig, loadConfigFile } from '../../src/config/load.ts';
import { MIB } from '../../src/units.ts';

const folder = mkdtempSync(join(tmpdir(), 'varve-config-'));
afterAll(() => {
  rmSync(folder, { recursive: true });
});

let files = 0;
function fileWith(text: string): string {
  const path = join(folder, `${files++}.toml`);
  writeFileSync(path, text);
  return path;
}

function problemsOf(text: string): Map<string, string> {
  const loaded = loadConfigFile(fileWith(text));
  if (loaded.ok) throw new Error('expected problems');
  return new Map(loaded.error.problems.map((p) => [p.key, p.message]));
}

test('an empty file gives the defaults, in bytes and milliseconds', () => {
  const loaded = loadConfigFile(fileWith(''));
  if (!loaded.ok) throw new Error(loaded.error.message);
  expect(loaded.value.memorySnapshot.trackingMode).toBe('mincore');
  expect(loaded.value.pipeline.coalesce.batchBytes).toBe(4 * MIB);
  expect(loaded.value.pipeline.coalesce.joinGapPages).toBe(0);
  expect(loaded.value.pipeline.precopy.rounds).toBe(0);
  expect(loaded.value.capture.resumeAfter).toBe('publish');
  expect(loaded.value.capture.pauseDeadline).toBe(30_000);
  expect(loaded.value.lineage).toEqual({ advance: true, maxChain: 32 });
  expect(loaded.value.catalog.url).toBe('sqlite:/var/lib/varve/catalog.db');
  expect(loaded.value.paths.layers).toBe('/var/lib/varve/layers');
});

test('every problem is reported at once, with file and key', () => {
  const path = fileWith(`
[memory_snapshot]
tracking_mode = "soft-dirty"
[pipeline]
slab_bytes = "4MB"
[pipeline.read]
concurency = 3
[capture]
pause_deadline = 30
[colour]
x = 1
`);
  const loaded = loadConfigFile(path);
  if (loaded.ok) throw new Error('expected problems');
  expect(loaded.error.kind).toBe('config-invalid');
  expect(loaded.error.message).toContain(`${path}: 5 problems`);
  const byKey = new Map(loaded.error.problems.map((p) => [p.key, p.message]));
  expect(byKey.get('memory_snapshot.tracking_mode')).toContain('"mincore"');
  expect(byKey.get('pipeline.slab_bytes')).toContain('binary unit');
  expect(byKey.get('pipeline.read.concurency')).toContain('concurrency');
  expect(byKey.get('capture.pause_deadline')).toContain("'30s'");
  expect(byKey.get('colour')).toContain('unknown key');
});

test('values that do not fit together are refused at their key', () => {
  expect(
    problemsOf('[pipeline]\nslab_bytes = "1MiB"\n').get('pipeline.coalesce.batch_bytes'),
  ).toContain('pipeline.slab_bytes');
  expect(problemsOf('[pipeline]\nslab_bytes = "4097B"\n').get('pipeline.slab_bytes')).toBeDefined();
  expect(problemsOf('[memory_snapshot]\nblock_bytes = "12KiB"\n').size).toBe(1);
  const tokens = problemsOf('[[auth.tokens]]\nname = "ci"\nscopes = ["read"]\n');
  expect(tokens.get('auth.tokens[0]')).toContain('exactly one');
});

test.each([
  ['4', 'pipeline.slab_bytes'],
  ['-4MiB', 'pipeline.slab_bytes'],
  ['4.5MiB', 'pipeline.slab_bytes'],
  ['999999999999999TiB', 'pipeline.slab_bytes'],
  ['1B', 'pipeline.slab_bytes'],
])('the size %s is refused', (size, key) => {
  expect([...problemsOf(`[pipeline]\nslab_bytes = "${size}"\n`).keys()]).toContain(key);
});

test('broken TOML names line and column', () => {
  const loaded = loadConfigFile(fileWith('[server]\nlisten = \n'));
  if (loaded.ok) throw new Error('expected a syntax error');
  expect(loaded.error.kind).toBe('config-syntax');
  expect(loaded.error.message).toMatch(/line 2, column \d+/);
});

test('a missing file, a folder and a device are unreadable, and say so', () => {
  for (const path of [join(folder, 'missing.toml'), folder, '/dev/zero']) {
    const loaded = loadConfigFile(path);
    if (loaded.ok) throw new Error('expected an error');
    expect(loaded.error.kind).toBe('config-unreadable');
    expect(loaded.error.message).toContain(path);
  }
});

test('a path given wins over VARVE_CONFIG', () => {
  const given = fileWith('[lineage]\nmax_chain = 5\n');
  const fromEnv = fileWith('[lineage]\nmax_chain = 6\n');
  const env = { VARVE_CONFIG: fromEnv };
  const first = loadConfig({ path: given, env });
  const second = loadConfig({ env });
  expect(first.ok && first.value.lineage.maxChain).toBe(5);
  expect(second.ok && second.value.lineage.maxChain).toBe(6);
});

test('secrets are printed by nothing', () => {
  const config = configOf({
    auth: { tokens: [{ name: 'ci', scopes: ['read'], token: 'a-very-secret-token' }] },
    catalog: { url: 'postgres://varve@db.internal/varve', password: 'p:@/%word' },
  });
  const printed = [
    JSON.stringify(config),
    inspect(config, { depth: null }),
    `${config.catalog.password?.toString()}`,
  ];
  for (const text of printed) {
    expect(text).not.toContain('very-secret');
    expect(text).not.toContain('%word');
  }
  expect(config.auth.tokens[0]?.token?.reveal()).toBe('a-very-secret-token');
  const url = new URL(catalogUrl(config.catalog));
  expect(decodeURIComponent(url.password)).toBe('p:@/%word');
});

test('a password in the catalog url is refused', () => {
  expect(problemsOf('[catalog]\nurl = "postgres://u:pw@h/d"\n').get('catalog.url')).toContain(
    'password',
  );
});

test('the configuration is frozen at every depth', () => {
  const config = configOf({});
  const read = config.pipeline.read as { concurrency: number };
  expect(() => (read.concurrency = 9)).toThrow(TypeError);
  expect(() => (config.paths.socketRoots as string[]).push('/')).toThrow(TypeError);
});
