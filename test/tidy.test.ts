import { join } from 'node:path';
import { expect, test } from 'vitest';
import {
  longFunctions,
  marked,
  sourceFiles,
  tooLong,
  unimported,
  wrongImports,
} from '../tools/tidy.ts';

const files = sourceFiles(join(import.meta.dirname, '..'));

test('the checks see the files', () => {
  const paths = files.map((file) => file.path);
  expect(paths).toContain('src/units.ts');
  expect(paths).toContain('tools/tidy.ts');
});

test('imports point one way', () => {
  expect(wrongImports(files)).toEqual([]);
});

test('no file of src is without an importer', () => {
  expect(unimported(files)).toEqual([]);
});

test('files and lines keep their size', () => {
  expect(tooLong(files)).toEqual([]);
});

test('functions keep their size', () => {
  expect(longFunctions(files)).toEqual([]);
});

test('no mark of unfinished work is left', () => {
  expect(marked(files)).toEqual([]);
});

test('each check finds what it is for', () => {
  const bad = [
    { path: 'src/units.ts', text: 'export const unit = 1;\n' },
    { path: 'src/layer/a.ts', text: "import { run } from '../capture/run.ts';\n" },
    { path: 'src/capture/run.ts', text: `export const run = 1; // ${'TO' + 'DO'}: all\n` },
    { path: 'src/cli/orphan.ts', text: `export const wide = ${'x + '.repeat(25)}1;\n` },
    { path: 'src/api/long.ts', text: `export function f() {\n${'  g();\n'.repeat(80)}}\n` },
    { path: 'native/core/big.cpp', text: 'int x;\n'.repeat(501) },
  ];
  expect(wrongImports(bad)).toEqual([
    'src/layer/a.ts imports src/capture/run.ts: layer may not import capture',
  ]);
  expect(unimported(bad)).toContain('src/cli/orphan.ts: nothing imports it');
  expect(tooLong(bad)).toEqual([
    'src/cli/orphan.ts:1: 122 columns',
    'native/core/big.cpp: 501 lines, over 500',
  ]);
  expect(longFunctions(bad)).toEqual(['src/api/long.ts:1: a function of 82 lines']);
  expect(marked(bad)).toHaveLength(1);
});
