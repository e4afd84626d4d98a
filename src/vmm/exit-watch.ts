/**
 * Notices that watched processes exited, within 100 ms: one timer for all of them, running only
 * while somebody waits, polling each pidfd (a microsecond each). Node's event loop cannot poll a
 * pidfd itself.
 */
import { pidfdExited } from '../native/guest.ts';

/** Half of the promise, so that a late timer still keeps it. */
const POLL_MS = 40;

interface Watch {
  readonly pidfd: number;
  readonly exited: () => void;
}

const watches = new Set<Watch>();
let timer: NodeJS.Timeout | undefined;

/** Calls `exited` once, soon after the process behind `pidfd` has. The result stops watching. */
export function watchExit(pidfd: number, exited: () => void): () => void {
  const watch: Watch = { pidfd, exited };
  watches.add(watch);
  if (timer === undefined) {
    timer = setInterval(poll, POLL_MS);
    timer.unref();
  }
  return () => {
    watches.delete(watch);
    stopWhenIdle();
  };
}

/** How many are watched now; for the leak tests. */
export function watchCount(): number {
  return watches.size;
}

function poll(): void {
  for (const watch of watches) {
    if (!pidfdExited(watch.pidfd)) continue;
    watches.delete(watch);
    watch.exited();
  }
  stopWhenIdle();
}

function stopWhenIdle(): void {
  if (watches.size > 0 || timer === undefined) return;
  clearInterval(timer);
  timer = undefined;
}
