/**
 * Whether a process is there, asked by its number. Only ESRCH says that it is gone: every other error
 * (no descriptor to be had, a hidden /proc, no permission) says nothing of it.
 */
import { readFileSync } from 'node:fs';
import { systemCode } from '../result.ts';
import { errnoName, processStartTime } from '../native/guest.ts';

/** A process that may not be signalled is there all the same. */
export function isGone(pid: number): boolean {
  try {
    process.kill(pid, 0);
    return false;
  } catch (error) {
    return systemCode(error) === 'ESRCH';
  }
}

/**
 * Whether this very process lives. Where its start time cannot be asked, the number alone must do: it
 * counts as living, and whoever acts on it identifies it first.
 */
export function isAlive(of: { readonly pid: number; readonly startTimeTicks: bigint }): boolean {
  const started = processStartTime(of.pid);
  if (started.error === 0) return started.ticks === of.startTimeTicks;
  return !['ESRCH', 'ENOENT'].includes(errnoName(started.error)) || !isGone(of.pid);
}

let boot: string | null | undefined;

/** Names this boot of the kernel; null where it does not say. */
export function bootId(): string | null {
  if (boot !== undefined) return boot;
  try {
    boot = readFileSync('/proc/sys/kernel/random/boot_id', 'utf8').trim();
  } catch {
    boot = null;
  }
  return boot;
}
