/**
 * Places where the process kills itself when told to, so that what a crash leaves behind there can be
 * tested exactly. Told by a file: with `VARVE_CRASH_FILE=/path` set, the process dies with SIGKILL as
 * soon as it passes the point whose name that file holds. Without the variable nothing is looked at.
 * For tests of recovery: docs/reliability.md, test/lineage/crash-matrix.test.ts.
 */
import { readFileSync } from 'node:fs';

/** In the order in which a capture passes them; those of attaching, forks and compactions beside. */
export const crashPoints = [
  'folder-made',
  'intent-recorded',
  'pause-intended',
  'vm-paused',
  'set-fetched',
  'ledger-durable',
  'copy-running',
  'layer-sealed',
  'seal-recorded',
  'epoch-committed',
  'artifacts-stored',
  'snapshot-catalogued',
  'publish-recorded',
  'before-resume',
  'vm-resumed',
  'attach-hold-intended',
  'attach-chain-local',
  'fork-state-kept',
  'fork-materialised',
  'fork-child-attached',
  'compaction-merged',
  'compaction-swapped',
] as const;
export type CrashPoint = (typeof crashPoints)[number];

const file = process.env['VARVE_CRASH_FILE'];

/** Returns at once, unless the file that `VARVE_CRASH_FILE` names holds this name. */
export function crashPoint(point: CrashPoint): void {
  if (file === undefined) return;
  if (wanted(file) === point) process.kill(process.pid, 'SIGKILL');
}

function wanted(path: string): string | null {
  try {
    return readFileSync(path, 'utf8').trim();
  } catch {
    // No file: no crash is asked for.
    return null;
  }
}
