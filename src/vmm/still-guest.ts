/**
 * Whether the guest stood still from the moment its VM's state was saved until the last of its bytes
 * was read (ADR 0046). A state of Paused cannot tell: its owner may have let it run and stopped it
 * again. So the turns of the VMM's vCPU threads on processors are compared: the thread of a paused
 * vCPU waits, and does not get one turn.
 *
 * G1 `saved` comes right after the answer to the question that saves the state, before any other.
 * G2 The VMM says Paused at some time after `saved`: a guest that was let go before it, and is idle,
 *    does not get turns either; whoever stops it gives it one.
 * G3 `verify` comes after the last byte, and before the resume that is ours.
 * G4 Where no vCPU thread can be told apart or counted, `counts` is false, and the question has to be
 *    asked after the last byte. A run that began and ended in between is not noticed then.
 * Tests: test/vmm/still-guest.test.ts, test/capture/torn.test.ts.
 */
import { readdir, readFile } from 'node:fs/promises';
import type { Clock } from '../clock.ts';
import { errnoName } from '../native/guest.ts';
import { runsSources, threadRuns, type RunsSource, type ThreadRuns } from '../native/threads.ts';
import { Failure, type FailureDetail } from '../result.ts';
import { vmmError, type VmmError } from './errors.ts';

/** `fc_vcpu 0` and so on in Firecracker, its forks and the small VM. */
const vcpuName = /vcpu/i;

/** VMMs have a few threads beside their vCPUs; one with more than this is not looked through. */
const threadsMax = 4096;

/**
 * How often a thread that is not asleep yet is looked at again, a millisecond apart. It has answered
 * already, and has only to get as far as its wait; on a busy host it may need a turn for that.
 */
const looksMax = 100;

interface Stood {
  readonly tid: number;
  readonly runs: ThreadRuns;
}

export interface StillGuestDeps {
  readonly pid: number;
  readonly clock: Clock;
  /** Where threads are listed; tests give another. */
  readonly taskFolder?: string;
  /** What is told of threads, best first; tests leave some out. */
  readonly sources?: readonly RunsSource[];
}

/** Of one capture. */
export class StillGuest {
  readonly #deps: StillGuestDeps;
  readonly #tids: readonly number[];
  readonly #source: RunsSource | null;
  #stood: readonly Stood[] | null = null;

  private constructor(deps: StillGuestDeps, tids: readonly number[]) {
    this.#deps = deps;
    this.#tids = tids;
    this.#source = tids.length === 0 ? null : sourceFor(deps, tids);
  }

  /** Finds the vCPU threads: before the pause. A started VM makes no more of them. Never rejects. */
  static async of(deps: StillGuestDeps): Promise<StillGuest> {
    const folder = deps.taskFolder ?? `/proc/${deps.pid}/task`;
    return new StillGuest(deps, await vcpuThreads(folder));
  }

  /** False: whether the guest ran can only be asked. */
  get counts(): boolean {
    return this.#source !== null;
  }

  /** G1. Throws as `verify`, where a vCPU does not come to rest; or the signal's reason. */
  async saved(signal: AbortSignal): Promise<void> {
    const { clock, pid } = this.#deps;
    const source = this.#source;
    if (source === null) return;
    for (let look = 1; ; look++) {
      const now = this.#tids.map((tid) => ({
        tid,
        runs: threadRuns(pid, tid, source, { withState: true }),
      }));
      const failed = now.find(({ runs }) => runs.error !== 0);
      if (failed !== undefined) throw new Failure(untold(pid, failed.tid, failed.runs.error));
      if (now.every(({ runs }) => runs.asleep)) {
        this.#stood = now;
        return;
      }
      if (look === looksMax) throw new Failure(ran(pid, 'did not come to rest'));
      await clock.sleep(1, signal);
    }
  }

  /** G3. Throws `vm-ran`; `read-failed` where that cannot be told. Nothing to do without `counts`. */
  verify(): void {
    const { pid } = this.#deps;
    const source = this.#source;
    if (source === null) return;
    if (this.#stood === null) throw new Error('assertion failed: no state was saved');
    for (const { tid, runs } of this.#stood) {
      const now = threadRuns(pid, tid, source, { withState: source === 'switches' });
      if (now.error !== 0) throw new Failure(untold(pid, tid, now.error));
      const same = now.turns === runs.turns && now.ranNs === runs.ranNs;
      if (!same || (source === 'switches' && !now.asleep)) {
        throw new Failure(ran(pid, 'had a turn'));
      }
    }
  }
}

/** What this process is told of these threads; null: nothing. */
function sourceFor(
  { pid, sources = runsSources }: StillGuestDeps,
  tids: readonly number[],
): RunsSource | null {
  const reads = (source: RunsSource): boolean =>
    tids.every((tid) => threadRuns(pid, tid, source, { withState: true }).error === 0);
  return sources.find(reads) ?? null;
}

/** Empty where they cannot be told apart from others. */
async function vcpuThreads(folder: string): Promise<readonly number[]> {
  try {
    const tids = await readdir(folder);
    if (tids.length > threadsMax) return [];
    const named = await Promise.all(
      tids.map(async (tid) => {
        const name = await readFile(`${folder}/${tid}/comm`, 'utf8').catch(() => '');
        return vcpuName.test(name) ? [Number(tid)] : [];
      }),
    );
    return named.flat();
  } catch {
    return [];
  }
}

function ran(pid: number, what: string): VmmError {
  const message =
    `the guest ran while it was captured: a vCPU of process ${pid} ${what} after the VM's state ` +
    'was saved. Somebody resumed the VM; what it wrote is in the next capture';
  return vmmError('vm-ran', message);
}

function untold(pid: number, tid: number, error: number): FailureDetail {
  const code = errnoName(error);
  const message = `whether vCPU thread ${tid} of process ${pid} ran cannot be told (${code})`;
  return { kind: 'read-failed', message };
}
