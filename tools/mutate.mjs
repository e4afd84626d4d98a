/**
 * `npm run test:mutation -- [room...] [--only=TEXT...]`: breaks the program in the ways that
 * `test/mutants/<room>.json` lists, one at a time, in a scratch copy, and runs the tests that
 * should notice. A mutant is an exact text that occurs once, and what stands in its place. The copy
 * has a compiled form of its own, and what is broken is compiled into it, so that worker threads,
 * small VMs and served daemons are broken too. A mutant of `native/` is compiled into the native
 * tests, whose groups its list names. Those tests must pass unbroken, and fail broken. One that
 * lets a test wait for a minute, or hangs, is said to hang: a busy machine does that too. `--only`
 * takes the mutants whose description holds one of the texts. Exit status 1 if any survives.
 */
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { chmodSync, cpSync, mkdtempSync, readFileSync, readdirSync, rmSync } from 'node:fs';
import { symlinkSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import ts from 'typescript';

const hangMs = 180_000;
const root = join(import.meta.dirname, '..');
const lists = join(root, 'test/mutants');
const named = process.argv.slice(2).filter((argument) => !argument.startsWith('--'));
const only = process.argv.flatMap((argument) => /^--only=(.*)/.exec(argument)?.[1] ?? []);
const isWanted = ({ what }) => only.length === 0 || only.some((text) => what.includes(text));
const rooms = readdirSync(lists)
  .filter((name) => name.endsWith('.json'))
  .map((name) => name.replace(/\.json$/, ''))
  .filter((room) => named.length === 0 || named.includes(room));

const scratch = mkdtempSync(join(tmpdir(), 'varve-mutants-'));
// PostgreSQL runs as nobody, and its binaries are found through here.
chmodSync(scratch, 0o755);
process.once('exit', () => rmSync(scratch, { recursive: true, force: true }));
const folders = ['src', 'migrations', 'test', 'tools', 'bench', 'config', 'docs', 'native', 'dist'];
const files = ['binding.gyp', 'package.json', 'tsconfig.json', 'vitest.config.ts'];
for (const name of [...folders, 'bin', 'scripts', ...files]) {
  // With their times: the native tests are built anew where a source is newer.
  cpSync(join(root, name), join(scratch, name), { recursive: true, preserveTimestamps: true });
}
for (const name of ['node_modules', 'build']) symlinkSync(join(root, name), join(scratch, name));

const { options } = ts.getParsedCommandLineOfConfigFile(
  join(root, 'tsconfig.build.json'),
  // A single file's own package.json is not looked at: it is said here that modules are ESM.
  { module: ts.ModuleKind.ESNext, moduleResolution: ts.ModuleResolutionKind.Bundler },
  ts.sys,
);

/** Writes a source file, and what it compiles to where threads and processes look for it. */
function write(file, text) {
  writeFileSync(join(scratch, file), text);
  if (!/^(src|migrations|bench)\/.*\.ts$/.test(file)) return;
  const fileName = join(root, file);
  const from = { compilerOptions: options, fileName, reportDiagnostics: true };
  const { outputText, diagnostics = [] } = ts.transpileModule(text, from);
  const problems = diagnostics.map((each) =>
    ts.flattenDiagnosticMessageText(each.messageText, ' '),
  );
  if (problems.length > 0) throw new Error(`${file}: ${problems.join(', ')}`);
  writeFileSync(join(scratch, 'dist', file.replace(/\.ts$/, '.js')), outputText);
}

const vitest = ['npx', '--no-install', 'vitest', 'run', '--bail', '1', '--testTimeout', '60000'];
const make = (...targets) => ['make', '--no-print-directory', '-C', 'native/test', ...targets];

const commandOf = (mutant) =>
  mutant.native === undefined ? [...vitest, ...mutant.tests] : make('run', `ONLY=${mutant.native}`);

/** As `write`. What is no program would be killed by anything. */
async function breakIt(mutant, text) {
  write(mutant.file, text);
  if (mutant.native === undefined) return;
  const { outcome, by } = await outcomeOf(make('all'));
  if (outcome !== 'passed') throw new Error(`${mutant.file} does not compile: ${by}`);
}

async function outcomeOf([program, ...flags]) {
  const env = { ...process.env, MODEL_SECONDS: '4' };
  // A group of its own, so that what hangs is ended with all that it started.
  const stdio = ['ignore', 'pipe', 'pipe'];
  const run = spawn(program, flags, { cwd: scratch, env, stdio, detached: true });
  let said = '';
  for (const output of [run.stdout, run.stderr]) {
    output.setEncoding('utf8').on('data', (piece) => (said += piece));
  }
  let hung = false;
  const end = setTimeout(() => {
    hung = true;
    process.kill(-run.pid, 'SIGKILL');
  }, hangMs);
  const [status] = await once(run, 'close');
  clearTimeout(end);
  if (hung) return { outcome: 'hung', by: '' };
  const text = said.replaceAll(/\u001b\[\d+m/g, '');
  const by = /^ *FAIL +(.*)|^- (.*)\n.*:\d+: /m.exec(text)?.slice(1).join('') ?? text.slice(-2000);
  if (/Test timed out in/.test(text)) return { outcome: 'hung', by };
  const ran = program === 'make' || Number(/Tests .*?(\d+) passed/.exec(text)?.[1] ?? 0) > 0;
  return { outcome: status === 0 && ran ? 'passed' : 'failed', by };
}

const verdicts = { passed: 'SURVIVED', failed: 'killed', hung: 'hung' };
const passing = new Set();
const counts = { passed: 0, failed: 0, hung: 0 };
for (const room of rooms) {
  const mutants = JSON.parse(readFileSync(join(lists, `${room}.json`), 'utf8'));
  for (const mutant of mutants.filter(isWanted)) {
    const { what, file, find, replace } = mutant;
    const text = readFileSync(join(scratch, file), 'utf8');
    const occurs = text.split(find).length - 1;
    if (occurs !== 1)
      throw new Error(`${room}: ${what}: its text occurs ${occurs} times in ${file}`);
    const command = commandOf(mutant);
    const key = command.join(' ');
    if (!passing.has(key)) {
      const unbroken = await outcomeOf(command);
      if (unbroken.outcome !== 'passed')
        throw new Error(`unbroken, ${key}: ${unbroken.outcome} ${unbroken.by}`);
      passing.add(key);
    }
    await breakIt(
      mutant,
      text.replace(find, () => replace),
    );
    const { outcome, by } = await outcomeOf(command);
    write(file, text);
    counts[outcome] += 1;
    console.log(`${verdicts[outcome].padEnd(8)} ${room}: ${what}`);
    if (outcome !== 'passed') console.log(`         by ${by}`);
  }
}
console.log(`${counts.failed} killed, ${counts.hung} hung, ${counts.passed} survived`);
process.exitCode = counts.passed === 0 ? 0 : 1;
