/** `varve selftest`: what works with the Firecracker that a user runs. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';
import { InvalidArgumentError, type Command } from 'commander';
import { configOf } from '../config/load.ts';
import { silentLogger } from '../observability/log.ts';
import { materialise } from '../restore/materialise.ts';
import { directHolds } from '../restore/restore-hold.ts';
import { Failure, type FailureDetail } from '../result.ts';
import { allCases } from '../selftest/cases.ts';
import { selftestHead, selftestRows, verdictText } from '../selftest/report.ts';
import { isFine, runSelftest, type BinaryOutcome } from '../selftest/run.ts';
import type { SelftestDaemon } from '../selftest/run-case.ts';
import { nodeId, type HoldId } from '../units.ts';
import { exitCodes, print } from './context.ts';
import { openParts, valueOf } from './parts.ts';
import { progressLine } from './progress.ts';
import { unsupervised } from './supervise.ts';
import { untilSignal } from './signals.ts';
import { table } from './table.ts';

function notReleased(hold: HoldId, error: FailureDetail): never {
  throw new Failure({ ...error, message: `hold ${hold} could not be released: ${error.message}` });
}

/** The parts of a daemon in this process; its VMs die with it. */
export async function openSelftestDaemon(
  stateFolder: string,
  socketRoot: string,
): Promise<SelftestDaemon> {
  const config = configOf({
    node: { id: 'selftest' },
    paths: { state: stateFolder, socket_roots: [socketRoot] },
    pipeline: { slab_budget: '128MiB' },
  });
  const parts = await openParts({ config, logger: silentLogger(), supervise: unsupervised });
  valueOf(await parts.catalogTried);
  const holds = directHolds(parts.catalog, notReleased);
  return {
    captures: parts.service,
    async restore(snapshot, folder, signal) {
      const deps = { ...parts, nodeId: nodeId(config.node.id), holds };
      const made = await materialise(deps, { snapshot, folder, signal });
      if (made.vmStatePath === null) throw new Error('a snapshot of a VM has its state');
      return { memoryPath: made.memoryPath, vmStatePath: made.vmStatePath };
    },
    [Symbol.asyncDispose]: () => parts[Symbol.asyncDispose](),
  };
}

interface SelftestCliOptions {
  readonly firecracker: readonly string[];
  readonly memory: number;
  readonly twoRegions: boolean;
  readonly only?: string;
  readonly folder?: string;
}

const mebibytes = (text: string): number => {
  const value = Number(text);
  if (!Number.isInteger(value) || value < 64 || value > 1_048_576) {
    throw new InvalidArgumentError('use a whole number of MiB, 64 or more.');
  }
  return value;
};

export async function selftest(
  options: SelftestCliOptions,
  signal: AbortSignal,
): Promise<readonly BinaryOutcome[]> {
  const { memory, twoRegions, only } = options;
  const all = allCases({ memoryMib: memory, twoRegions });
  const cases = only === undefined ? all : all.filter(({ name }) => name.includes(only));
  const folder = mkdtempSync(join(resolve(options.folder ?? tmpdir()), 'varve-st-'));
  using line = progressLine();
  try {
    return await runSelftest(
      {
        binaries: options.firecracker.map((path) => resolve(path)),
        cases,
        folder,
        openDaemon: openSelftestDaemon,
        onStep: (step) => line.show(step),
        onCase: (version, outcome) => {
          line[Symbol.dispose]();
          process.stderr.write(`${version}, ${outcome.name}: ${verdictText(outcome)}\n`);
        },
      },
      signal,
    );
  } finally {
    rmSync(folder, { recursive: true, force: true });
  }
}

function report(outcomes: readonly BinaryOutcome[]): string {
  const blocks = outcomes.map((one) =>
    [`${one.version}: ${one.binary}`, table([...selftestHead], selftestRows(one))].join('\n'),
  );
  const note =
    'FIRST and SECOND: frozen times of two captures while the guest writes. GUEST: its longest\n' +
    'standstill around the second, by its own clock. PAGES: selected by the second.';
  return [...blocks, note].join('\n\n');
}

export function addSelftest(program: Command): void {
  program
    .command('selftest')
    .description('try every way of capturing with the Firecracker binaries that you run')
    .requiredOption('--firecracker <path...>', 'one or more binaries')
    .option('--memory <MiB>', "the guests' memory", mebibytes, 256)
    .option('--no-two-regions', 'leave out guests of 4 GiB, which are written to disk whole')
    .option('--only <text>', 'only cases whose name has it')
    .option('--folder <path>', 'where VMs and snapshots go; removed at the end')
    .action(async (options: SelftestCliOptions, command: Command) => {
      const outcomes = await untilSignal((signal) => selftest(options, signal));
      print(command, outcomes, () => report(outcomes));
      if (!outcomes.every(({ cases }) => cases.every(isFine))) process.exitCode = exitCodes.failed;
    });
}
