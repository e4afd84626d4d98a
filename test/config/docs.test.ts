import { join } from 'node:path';
import { parse } from 'smol-toml';
import { expect, test } from 'vitest';
import { renderConfigPage, renderDefaultToml } from '../../src/config/docs.ts';
import { configOf, parseConfig } from '../../src/config/load.ts';

const root = join(import.meta.dirname, '../..');

test('the generated documents are fresh (`npm run docs` rewrites them)', async () => {
  await expect(renderConfigPage()).toMatchFileSnapshot(join(root, 'docs/ops/config.md'));
  await expect(renderDefaultToml()).toMatchFileSnapshot(join(root, 'config/varve.toml'));
});

test('config/varve.toml holds exactly the defaults', () => {
  const parsed = parseConfig(parse(renderDefaultToml()), 'varve.toml');
  if (!parsed.ok) throw new Error(parsed.error.message);
  expect(parsed.value).toEqual(configOf({}));
});

test('every key is described', () => {
  const undescribed = renderConfigPage()
    .split('\n')
    .filter((line) => line.startsWith('| `') && / \| *\|$/.test(line));
  expect(undescribed).toEqual([]);
});
