/** All cases with all given VMMs, one after the other. */
import { execFile } from 'node:child_process';
import { readFile } from 'node:fs/promises';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { Failure, systemCode } from '../result.ts';
import type { Case } from './cases.ts';
import { runCase, type CaseDeps, type CaseOutcome } from './run-case.ts';

export interface BinaryOutcome {
  readonly binary: string;
  /** What it says of itself. */
  readonly version: string;
  readonly cases: readonly CaseOutcome[];
}

export interface SelftestOptions extends Pick<CaseDeps, 'openDaemon' | 'onStep'> {
  readonly binaries: readonly string[];
  readonly cases: readonly Case[];
  /** Gets a folder per case, removed at its end. */
  readonly folder: string;
  readonly onCase: (version: string, outcome: CaseOutcome) => void;
}

/** Rejects with the signal's reason, once everything that was started has ended. */
export async function runSelftest(
  options: SelftestOptions,
  signal: AbortSignal,
): Promise<readonly BinaryOutcome[]> {
  const versions: string[] = [];
  for (const binary of options.binaries) versions.push(await versionOf(binary));
  const outcomes: BinaryOutcome[] = [];
  for (const [at, binary] of options.binaries.entries()) {
    const version = versions[at] ?? 'unknown';
    const cases: CaseOutcome[] = [];
    for (const [index, one] of options.cases.entries()) {
      signal.throwIfAborted();
      const folder = join(options.folder, `${at}-${index}`);
      const outcome =
        (await unableHere(one)) ?? (await runCase(one, { ...options, binary, folder }, signal));
      options.onCase(version, outcome);
      cases.push(outcome);
    }
    outcomes.push({ binary, version, cases });
  }
  return outcomes;
}

/** Why this host cannot run the case. */
async function unableHere(one: Case): Promise<CaseOutcome | null> {
  if (!one.hugePages) return null;
  const needed = one.memoryMib / 2;
  const path = '/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages';
  const free = Number(await readFile(path, 'utf8').catch(() => '0'));
  if (free >= needed) return null;
  const message = `this host has ${free} free huge pages of 2 MiB, and ${needed} are needed`;
  const reason = { kind: 'no-huge-pages', message };
  return { name: one.name, verdict: 'skipped', reason, captures: [], seconds: 0 };
}

/** Throws `Failure` where it cannot be run at all. */
async function versionOf(binary: string): Promise<string> {
  try {
    const { stdout } = await promisify(execFile)(binary, ['--version'], { timeout: 10_000 });
    return stdout.trim().split('\n')[0] ?? 'unknown';
  } catch (error) {
    const code = systemCode(error);
    if (code === undefined) return 'unknown';
    const message = `${binary} cannot be run: ${code}`;
    throw new Failure({ kind: 'vmm-not-started', message }, error);
  }
}

/** Whether nothing is wrong: a refusal that is right is fine, and so is what the host cannot run. */
export function isFine({ verdict }: CaseOutcome): boolean {
  return verdict === 'exact' || verdict === 'refused' || verdict === 'skipped';
}
