/**
 * `npm run test:mutation -- [room...]`: breaks the program in the ways that
 * `test/mutants/<room>.json` lists, one at a time, in a scratch copy, and runs the tests that
 * should notice. A mutant is an exact text that occurs once, and what stands in its place. Those
 * tests must pass unbroken, and fail broken. One that hangs is ended after three minutes and said
 * to hang: a busy machine does that too. Exit status 1 if any mutant survives.
 */
import { spawnSync } from 'node:child_process';
import { chmodSync, cpSync, mkdtempSync, readFileSync, readdirSync, rmSync } from 'node:fs';
import { symlinkSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';

const root = join(import.meta.dirname, '..');
const lists = join(root, 'test/mutants');
const named = process.argv.slice(2);
const rooms = readdirSync(lists)
  .map((name) => name.replace(/\.json$/, ''))
  .filter((room) => named.length === 0 || named.includes(room));

const scratch = mkdtempSync(join(tmpdir(), 'varve-mutants-'));
// PostgreSQL runs as nobody, and its binaries are found through here.
chmodSync(scratch, 0o755);
process.once('exit', () => rmSync(scratch, { recursive: true, force: true }));
for (const name of ['src', 'migrations', 'test', 'tools', 'bench', 'config', 'docs', 'native']) {
  cpSync(join(root, name), join(scratch, name), { recursive: true });
}
const files = ['binding.gyp', 'package.json', 'tsconfig.json', 'vitest.config.ts'];
for (const name of ['bin', 'scripts', ...files]) {
  cpSync(join(root, name), join(scratch, name), { recursive: true });
}
for (const name of ['node_modules', 'build', 'dist'])
  symlinkSync(join(root, name), join(scratch, name));

function outcomeOf(tests) {
  const flags = ['--no-install', 'vitest', 'run', '--bail', '1', ...tests];
  const run = spawnSync('npx', flags, {
    cwd: scratch,
    encoding: 'utf8',
    timeout: 180_000,
    env: { ...process.env, MODEL_SECONDS: '4' },
  });
  if (run.error?.code === 'ETIMEDOUT') return 'hung';
  const passed = /Tests .*?(\d+) passed/.exec(run.stdout.replaceAll(/\u001b\[\d+m/g, ''));
  return run.status === 0 && Number(passed?.[1] ?? 0) > 0 ? 'passed' : 'failed';
}

const passing = new Set();
let survivors = 0;
for (const room of rooms) {
  for (const mutant of JSON.parse(readFileSync(join(lists, `${room}.json`), 'utf8'))) {
    const { what, file, find, replace, tests } = mutant;
    const path = join(scratch, file);
    const text = readFileSync(path, 'utf8');
    const occurs = text.split(find).length - 1;
    if (occurs !== 1)
      throw new Error(`${room}: ${what}: its text occurs ${occurs} times in ${file}`);
    const key = tests.join(' ');
    if (!passing.has(key)) {
      const unbroken = outcomeOf(tests);
      if (unbroken !== 'passed') throw new Error(`unbroken, ${key}: ${unbroken}`);
      passing.add(key);
    }
    writeFileSync(
      path,
      text.replace(find, () => replace),
    );
    const outcome = outcomeOf(tests);
    writeFileSync(path, text);
    if (outcome === 'passed') survivors += 1;
    const verdict = { passed: 'SURVIVED', failed: 'killed', hung: 'hung' }[outcome];
    console.log(`${verdict.padEnd(8)} ${room}: ${what}`);
  }
}
process.exitCode = survivors === 0 ? 0 : 1;
