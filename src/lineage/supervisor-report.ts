/**
 * What `varve-supervisor` says that it did after a daemon's death: a VM that it resumed is not ours to
 * resume once more, since its owner may have paused it meanwhile.
 *
 * A line counts for one start: it is said of the pause that the last life left, and a later pause of
 * the same process must not be taken for that one. So the report is emptied before any of it is
 * believed; where that fails, or the daemon dies in between, recovery resumes the VM, as without it.
 */
import { open, writeFile } from 'node:fs/promises';
import type { FailureDetail, Result } from '../result.ts';
import { err, ok, systemCode } from '../result.ts';

/** One process for good, by its pid and field 22 of /proc/<pid>/stat. */
export interface ReportedProcess {
  readonly pid: number;
  readonly startTimeTicks: bigint;
}

/** Far more than any host has VMs for; a longer report is none of ours. */
const reportBytesMax = 4 * 1024 * 1024;

/**
 * Once the supervisor of the last life is through: what it resumed. Its words are kept beside the
 * report, with `.last` after the name, for people to read.
 */
export async function takeReport(
  path: string,
): Promise<Result<readonly ReportedProcess[], FailureDetail>> {
  try {
    await using file = await open(path, 'r+');
    const { size } = await file.stat();
    if (size === 0) return ok([]);
    if (size > reportBytesMax) {
      await file.truncate();
      return err({ kind: 'supervisor-report', message: `${path} had ${size} bytes; not read` });
    }
    const text = await file.readFile('latin1');
    await file.truncate();
    const last = { encoding: 'latin1', mode: 0o600 } as const;
    await writeFile(`${path}.last`, text, last).catch(() => undefined);
    return ok(resumedIn(text));
  } catch (error) {
    if (systemCode(error) === 'ENOENT') return ok([]);
    return err({ kind: 'supervisor-report', message: `${path}: ${String(error)}` });
  }
}

/** Lines that are not whole, or say anything else, say nothing. */
export function resumedIn(text: string): ReportedProcess[] {
  const line = /^resumed after \d+ ms: pid (\d{1,10}) start (\d{1,20}) \/.*\n/gm;
  return [...text.matchAll(line)].map(([, pid, ticks]) => ({
    pid: Number(pid),
    startTimeTicks: BigInt(ticks ?? ''),
  }));
}
