/**
 * The habits that a machine can check: import direction, sizes, marks, files that nothing
 * imports.
 */
import { execFileSync } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { dirname, join, normalize } from 'node:path';
import ts from 'typescript';

export const FILE_LINES_MAX = 500;
export const FUNCTION_LINES_MAX = 70;
export const LINE_COLUMNS_MAX = 100;
/** For what Prettier does not break: comments, and strings such as the titles of tests. */
export const PROSE_COLUMNS_MAX = 126;

/**
 * Which rooms of `src/` a room may import, besides itself and the vocabulary. A room missing here
 * may import nothing. Source: ARCHITECTURE.md.
 */
const leaves = ['native', 'layer', 'artifact', 'catalog', 'vmm'];
const aboveLeaves = [...leaves, 'config', 'observability', 'pipeline'];
const aboveStages = [...aboveLeaves, 'stages', 'lineage', 'gc', 'restore'];
const aboveCapture = [...aboveStages, 'capture'];
export const mayImport: Readonly<Record<string, readonly string[]>> = {
  vocabulary: [],
  native: [],
  config: [],
  observability: ['config'],
  layer: ['native'],
  artifact: ['native'],
  catalog: ['native', 'artifact', 'migrations'],
  migrations: [],
  vmm: ['native'],
  minivm: ['native'],
  pipeline: [...leaves, 'config', 'observability'],
  stages: [...aboveLeaves, 'lineage'],
  lineage: aboveLeaves,
  gc: aboveLeaves,
  restore: [...aboveLeaves, 'lineage'],
  capture: aboveStages,
  api: aboveCapture,
  selftest: aboveCapture,
  cli: [...aboveCapture, 'api', 'minivm', 'migrations', 'selftest'],
  main: [...aboveCapture, 'api', 'cli'],
};

/** Started as processes or worker threads by name, so no import leads to them. */
const entries = new Set(['src/main.ts', 'src/minivm/main.ts']);

export interface SourceFile {
  /** Relative to the checkout, with forward slashes. */
  readonly path: string;
  readonly text: string;
}

/** Files that Git knows, or would add. */
export function sourceFiles(root: string): SourceFile[] {
  const args = ['ls-files', '--cached', '--others', '--exclude-standard', '-z'];
  const listed = execFileSync('git', args, { cwd: root, encoding: 'utf8' });
  return listed
    .split('\0')
    .filter((path) => /\.(ts|cpp|hpp|c|h)$/.test(path))
    .flatMap((path) => {
      try {
        return [{ path, text: readFileSync(join(root, path), 'utf8') }];
      } catch {
        return []; // Deleted, and not yet committed.
      }
    });
}

/**
 * The room a file belongs to; undefined for tests, benches and tools, which may import
 * anything.
 */
export function roomOf(path: string): string | undefined {
  if (path === 'src/main.ts') return 'main';
  if (path.startsWith('migrations/')) return 'migrations';
  if (!path.startsWith('src/')) return undefined;
  const parts = path.split('/');
  return parts.length === 2 ? 'vocabulary' : parts[1];
}

const parse = (file: SourceFile): ts.SourceFile =>
  ts.createSourceFile(file.path, file.text, ts.ScriptTarget.ES2022, true);

/** Relative imports of a file, as paths from the checkout. */
export function importsOf(file: SourceFile): string[] {
  const found: string[] = [];
  const visit = (node: ts.Node): void => {
    if (ts.isStringLiteralLike(node) && /^\.{1,2}\//.test(node.text)) {
      const target = normalize(join(dirname(file.path), node.text));
      found.push(target.replace(/\.js$/, '.ts'));
    }
    ts.forEachChild(node, visit);
  };
  visit(parse(file));
  return found;
}

/** Imports that go against the arrows, as sentences. */
export function wrongImports(files: readonly SourceFile[]): string[] {
  return files.flatMap((file) => {
    const room = roomOf(file.path);
    if (room === undefined || !file.path.endsWith('.ts')) return [];
    const allowed = new Set([room, 'vocabulary', ...(mayImport[room] ?? [])]);
    return importsOf(file).flatMap((target) => {
      const targetRoom = roomOf(target);
      const isFine = targetRoom === undefined || allowed.has(targetRoom);
      return isFine ? [] : [`${file.path} imports ${target}: ${room} may not import ${targetRoom}`];
    });
  });
}

/** Files of `src/` that no other file names, as sentences. */
export function unimported(files: readonly SourceFile[]): string[] {
  const code = files.filter((file) => file.path.endsWith('.ts'));
  const named = new Set(code.flatMap(importsOf));
  return code
    .filter((file) => file.path.startsWith('src/') && !entries.has(file.path))
    .filter((file) => !named.has(file.path))
    .map((file) => `${file.path}: nothing imports it`);
}

function isTooWide(line: string): boolean {
  if (line.length > PROSE_COLUMNS_MAX) return true;
  const isComment = /^\s*(\/\/|\/?\*)/.test(line);
  if (/^\s*\/\^.*\$\/;$/.test(line)) return false; // A pattern on a line of its own.
  const code = line.replace(/'[^']*'|"[^"]*"|`[^`]*`/g, "''");
  return !isComment && code.length > LINE_COLUMNS_MAX;
}

/** Files and lines over their size, as sentences. */
export function tooLong(files: readonly SourceFile[]): string[] {
  return files.flatMap((file) => {
    const lines = file.text.split('\n');
    const count = lines.at(-1) === '' ? lines.length - 1 : lines.length;
    const size =
      count > FILE_LINES_MAX ? [`${file.path}: ${count} lines, over ${FILE_LINES_MAX}`] : [];
    const wide = lines.flatMap((line, at) =>
      isTooWide(line) ? [`${file.path}:${at + 1}: ${line.length} columns`] : [],
    );
    return [...size, ...wide];
  });
}

/**
 * Functions over their size, as sentences. Callbacks of `describe` are only a bracket around
 * tests.
 */
export function longFunctions(files: readonly SourceFile[]): string[] {
  return files.flatMap((file) => {
    if (!file.path.endsWith('.ts')) return [];
    const source = parse(file);
    const lineOf = (at: number): number => source.getLineAndCharacterOfPosition(at).line + 1;
    const found: string[] = [];
    const visit = (node: ts.Node): void => {
      if (ts.isFunctionLike(node) && !isDescribeCallback(node)) {
        const first = lineOf(node.getStart());
        const lines = lineOf(node.getEnd()) - first + 1;
        if (lines > FUNCTION_LINES_MAX)
          found.push(`${file.path}:${first}: a function of ${lines} lines`);
      }
      ts.forEachChild(node, visit);
    };
    visit(source);
    return found;
  });
}

function isDescribeCallback(node: ts.Node): boolean {
  const call = node.parent;
  return ts.isCallExpression(call) && /^(describe|onEachDialect)\b/.test(call.expression.getText());
}

// Put together here, so that this file does not hold them.
const marks = new RegExp(
  `\\b(${['FIX' + 'ME', 'TO' + 'DO', 'X' + 'XX', 'HA' + 'CK'].join('|')})\\b`,
);

/** Marks of unfinished work, as sentences. */
export function marked(files: readonly SourceFile[]): string[] {
  return files.flatMap((file) =>
    file.text
      .split('\n')
      .flatMap((line, at) => (marks.test(line) ? [`${file.path}:${at + 1}: ${line.trim()}`] : [])),
  );
}
