/**
 * Locks of open files (flock). They end with the opening's last descriptor, so with the process,
 * however that ends, and are seen by every process on the host, whatever its PID namespace.
 */
import { errnoName } from './guest.ts';
import { loadAddon } from './load.ts';

/** `unknown`: the filesystem cannot say; `code` is what it said instead (`ENOLCK`, …). */
export type LockOutcome =
  { readonly kind: 'locked' } | { readonly kind: 'held' } | { kind: 'unknown'; code: string };

interface FilesAddon {
  tryLock(fd: number, exclusive: number): number;
}

/** Never waits. `held`: another opening of the file, here or elsewhere, has a lock against it. */
export function tryLock(fd: number, how: 'shared' | 'exclusive'): LockOutcome {
  const error = (loadAddon() as FilesAddon).tryLock(fd, how === 'exclusive' ? 1 : 0);
  if (error === 0) return { kind: 'locked' };
  const code = errnoName(error);
  return code === 'EAGAIN' ? { kind: 'held' } : { kind: 'unknown', code };
}
