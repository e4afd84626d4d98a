/**
 * Which process is behind an API socket. The pid comes from the kernel (`SO_PEERCRED`: who called
 * listen), is pinned with a pidfd and its start time, and never taken from the VMM's own word.
 *
 * I1 A pid is only used while its pidfd says the process lives: a recycled pid is another process.
 * I2 `check` before the first byte and after the last one brackets every read of the VM's memory.
 * Tests: test/vmm/identity.test.ts.
 */
import { statSync } from 'node:fs';
import {
  closeFd,
  errnoName,
  peerCredentials,
  pidfdExited,
  pidfdOpen,
  processStartTime,
} from '../native/guest.ts';
import { err, ok, type Result } from '../result.ts';
import { vmmError, type VmmError } from './errors.ts';
import { watchExit } from './exit-watch.ts';

export type IdentityCheck = 'same' | 'exited' | 'replaced';

/** A pinned process. Dispose it when the VM is detached: it holds a file descriptor. */
export interface ProcessIdentity extends Disposable {
  readonly socketPath: string;
  readonly pid: number;
  readonly uid: number;
  /** Clock ticks since boot (`/proc/pid/stat` field 22). */
  readonly startTimeTicks: bigint;
  readonly pidfd: number;
  /** `replaced`: another process listens on the socket now, whether or not ours still lives. */
  check(): IdentityCheck;
  /** Only asks the pidfd: a microsecond, no socket. */
  hasExited(): boolean;
  /** Resolves within 100 ms of the exit; rejects with the signal's reason, or when disposed. */
  onExit(signal: AbortSignal): Promise<void>;
}

/** Finds and pins the process that listens on `socketPath`. Never blocks for more than a second. */
export function identify(socketPath: string): Result<ProcessIdentity, VmmError> {
  const peer = peerCredentials(socketPath);
  if (peer.error !== 0) return err(peerError(socketPath, peer.error));
  if (peer.pid <= 0) {
    const message =
      `the process that listens on ${socketPath} is not visible from this pid namespace; ` +
      'run the daemon in the host namespace (or share it)';
    return err(vmmError('permission-denied', message, { socketPath }));
  }
  const opened = pidfdOpen(peer.pid);
  if (opened.error !== 0) return err(pidError(socketPath, peer.pid, opened.error));
  const started = processStartTime(peer.pid);
  // The pid was free to be recycled between the first question and the pidfd: ask again.
  const again = peerCredentials(socketPath);
  const unknown = started.error !== 0 ? started.error : again.error;
  if (unknown !== 0 && !pidfdExited(opened.fd)) {
    closeFd(opened.fd);
    const code = errnoName(unknown);
    const message = `cannot look at pid ${peer.pid} behind ${socketPath} (${code})`;
    return err(vmmError('vmm-unreachable', message, { socketPath, code }));
  }
  if (unknown !== 0 || again.pid !== peer.pid || pidfdExited(opened.fd)) {
    closeFd(opened.fd);
    const message = `the process behind ${socketPath} (pid ${peer.pid}) exited just now`;
    return err(vmmError('vm-exited', message, { socketPath }));
  }
  return ok(
    new PinnedProcess({
      socketPath,
      pid: peer.pid,
      uid: peer.uid,
      startTimeTicks: started.ticks,
      pidfd: opened.fd,
    }),
  );
}

/** The error for a check that did not say `same`. */
export function identityError(
  identity: ProcessIdentity,
  check: Exclude<IdentityCheck, 'same'>,
): VmmError {
  const { socketPath, pid } = identity;
  return check === 'exited'
    ? vmmError('vm-exited', `the VM at ${socketPath} exited (pid ${pid})`, { socketPath })
    : vmmError('vm-replaced', `another process than pid ${pid} listens on ${socketPath} now`, {
        socketPath,
      });
}

interface Pinned {
  readonly socketPath: string;
  readonly pid: number;
  readonly uid: number;
  readonly startTimeTicks: bigint;
  readonly pidfd: number;
}

class PinnedProcess implements ProcessIdentity {
  readonly socketPath: string;
  readonly pid: number;
  readonly uid: number;
  readonly startTimeTicks: bigint;
  readonly pidfd: number;
  #disposed = false;
  readonly #waiting = new Set<(reason: Error) => void>();

  constructor(pinned: Pinned) {
    this.socketPath = pinned.socketPath;
    this.pid = pinned.pid;
    this.uid = pinned.uid;
    this.startTimeTicks = pinned.startTimeTicks;
    this.pidfd = pinned.pidfd;
  }

  hasExited(): boolean {
    this.#assertLive();
    return pidfdExited(this.pidfd);
  }

  check(): IdentityCheck {
    const exited = this.hasExited();
    const peer = peerCredentials(this.socketPath);
    if (peer.error === 0 && peer.pid > 0 && peer.pid !== this.pid) return 'replaced';
    // A process that lives keeps its number; an error of anything else says nothing of it.
    return exited ? 'exited' : 'same';
  }

  onExit(signal: AbortSignal): Promise<void> {
    this.#assertLive();
    return new Promise((resolve, reject) => {
      if (signal.aborted) {
        reject(signal.reason as Error);
        return;
      }
      const release = (): void => {
        stop();
        this.#waiting.delete(onDispose);
        signal.removeEventListener('abort', onAbort);
      };
      const onAbort = (): void => {
        release();
        reject(signal.reason as Error);
      };
      const onDispose = (reason: Error): void => {
        release();
        reject(reason);
      };
      const stop = watchExit(this.pidfd, () => {
        release();
        resolve();
      });
      this.#waiting.add(onDispose);
      signal.addEventListener('abort', onAbort, { once: true });
    });
  }

  [Symbol.dispose](): void {
    if (this.#disposed) return;
    this.#disposed = true;
    const reason = new Error(`the watch on pid ${this.pid} ended: its VM was detached`);
    for (const end of [...this.#waiting]) end(reason);
    closeFd(this.pidfd);
  }

  /** A closed descriptor's number may already be somebody else's. */
  #assertLive(): void {
    if (this.#disposed) throw new Error('assertion failed: the identity is disposed');
  }
}

function peerError(socketPath: string, error: number): VmmError {
  const code = errnoName(error);
  const more = { socketPath, code };
  switch (code) {
    case 'ENOENT':
      return vmmError('vmm-unreachable', `there is no socket at ${socketPath}`, more);
    case 'ECONNREFUSED':
      return isSocket(socketPath)
        ? vmmError('vmm-unreachable', `nothing listens on ${socketPath}`, more)
        : vmmError('vmm-not-a-vmm', `${socketPath} is not a socket`, more);
    case 'EACCES':
    case 'EPERM':
      return vmmError('permission-denied', `no permission to connect to ${socketPath}`, more);
    case 'EPROTOTYPE':
    case 'ENOTSOCK':
      return vmmError('vmm-not-a-vmm', `${socketPath} is not a stream socket`, more);
    default:
      return vmmError('vmm-unreachable', `cannot connect to ${socketPath} (${code})`, more);
  }
}

function isSocket(path: string): boolean {
  return statSync(path, { throwIfNoEntry: false })?.isSocket() ?? true;
}

function pidError(socketPath: string, pid: number, error: number): VmmError {
  const code = errnoName(error);
  const more = { socketPath, code };
  if (code === 'ESRCH') {
    return vmmError('vm-exited', `the process behind ${socketPath} (pid ${pid}) exited`, more);
  }
  const denied = code === 'EPERM' || code === 'EACCES';
  const kind = denied ? 'permission-denied' : 'vmm-unreachable';
  return vmmError(kind, `cannot pin pid ${pid} with a pidfd (${code})`, more);
}
