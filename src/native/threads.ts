/**
 * Whether threads of other processes have been on a processor. Synchronous, some microseconds a
 * thread. What the kernel refuses comes back as `error`, an errno (0 = none), for `errnoName`.
 */
import { loadAddon } from './load.ts';

/**
 * `schedstat` is cheapest, and needs a kernel that counts (CONFIG_SCHED_INFO; ENODATA where it does
 * not). `switches` are counted by every kernel, when a thread is taken off its processor.
 */
export const runsSources = ['schedstat', 'switches'] as const;
export type RunsSource = (typeof runsSources)[number];

export interface ThreadRuns {
  /** Time on processors, nanoseconds; 0 from `switches`. */
  readonly ranNs: bigint;
  /** Moves whenever the thread is put on a processor (`switches`: or taken off it). */
  readonly turns: bigint;
  /** It waits for something. False unless asked for; read before the rest. */
  readonly asleep: boolean;
  /** ESRCH, ENOENT: there is no such thread. */
  readonly error: number;
}

interface ThreadsAddon {
  threadRuns(pid: number, tid: number, source: number, withState: number): ThreadRuns;
}

export const threadRuns = (
  pid: number,
  tid: number,
  source: RunsSource,
  options: { readonly withState: boolean },
): ThreadRuns =>
  (loadAddon() as ThreadsAddon).threadRuns(
    pid,
    tid,
    runsSources.indexOf(source),
    options.withState ? 1 : 0,
  );
