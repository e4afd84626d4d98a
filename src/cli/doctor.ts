/** `varve doctor`: tries what the daemon needs, and says what is wrong and what to do. */
import type { Command } from 'commander';
import type { Config } from '../config/load.ts';
import { loadAddon } from '../native/load.ts';
import { configFrom, exitCodes, print } from './context.ts';
import {
  checkFiles,
  checkHugePages,
  checkKernel,
  checkKvm,
  checkMemlock,
  checkMemory,
  checkNode,
  checkSwapSpace,
  checkUserfaultfd,
} from './doctor-host.ts';
import { checkPagemap, checkPtrace, checkRead, checkThreadRuns } from './doctor-process.ts';
import { checkCatalog, checkFolders, checkListen, checkSocketRoots } from './doctor-storage.ts';
import { fail, fine, type Finding } from './finding.ts';

function checkAddon(): Finding {
  try {
    loadAddon();
    return fine('native-addon', 'loads, and is of this version');
  } catch (error) {
    return fail('native-addon', (error as Error).message, 'Run: npm run native:build');
  }
}

/** A check that itself fails is a finding too. */
async function safely(check: string, run: () => Finding | Promise<Finding>): Promise<Finding> {
  try {
    return await run();
  } catch (error) {
    return fail(check, `could not be checked: ${(error as Error).message}`, 'This may be a bug.');
  }
}

/** All findings, in the order in which they are worth reading. */
export async function examine(config: Config): Promise<readonly Finding[]> {
  const addon = checkAddon();
  const needsAddon =
    addon.level === 'ok'
      ? [
          await safely('process-read', checkRead),
          await safely('pagemap', checkPagemap),
          await safely('thread-runs', checkThreadRuns),
        ]
      : [];
  return [
    await safely('kernel', checkKernel),
    checkNode(),
    addon,
    await safely('kvm', checkKvm),
    await safely('ptrace', checkPtrace),
    ...needsAddon,
    await safely('userfaultfd', checkUserfaultfd),
    await safely('swap', () => checkSwapSpace(config)),
    await safely('memory', () => checkMemory(config)),
    await safely('huge-pages', checkHugePages),
    await safely('open-files', checkFiles),
    await safely('memlock', checkMemlock),
    ...checkFolders(config),
    checkSocketRoots(config),
    checkListen(config),
    await safely('catalog', () => checkCatalog(config)),
  ];
}

const marks = { ok: 'ok  ', warn: 'WARN', fail: 'FAIL' } as const;

function report(findings: readonly Finding[]): string {
  const width = Math.max(...findings.map(({ check }) => check.length));
  const lines = findings.flatMap(({ check, level, found, advice }) => [
    `${marks[level]}  ${check.padEnd(width)}  ${found}`,
    ...(advice === undefined ? [] : [`      ${' '.repeat(width)}  → ${advice}`]),
  ]);
  const count = (level: Finding['level']): number =>
    findings.filter((finding) => finding.level === level).length;
  return [...lines, '', `${count('fail')} failed, ${count('warn')} warnings`].join('\n');
}

export function addDoctor(program: Command): void {
  program
    .command('doctor')
    .description('check whether this host and configuration can capture VMs')
    .action(async (_options, command: Command) => {
      const findings = await examine(configFrom(command));
      print(command, findings, () => report(findings));
      if (findings.some(({ level }) => level === 'fail')) process.exitCode = exitCodes.failed;
    });
}
