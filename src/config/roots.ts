/** Paths that clients name must lie under configured folders, whatever links are in the way. */
import { realpathSync } from 'node:fs';
import { basename, dirname, join, normalize } from 'node:path';
import { err, ok, systemCode, type FailureDetail, type Result } from '../result.ts';

export interface RootsError extends FailureDetail {
  readonly kind: 'path-outside-roots' | 'path-missing' | 'path-invalid';
}

/** Linux takes no longer path. */
const PATH_BYTES_MAX = 4096;

/** Paths are told to the supervisor as lines, and to the kernel as strings that end with a NUL. */
const UNTELLABLE = /[\n\0]/;

const isWithin = (path: string, root: string): boolean =>
  root === '/' ? path.startsWith('/') : path === root || path.startsWith(`${root}/`);

/** The real path of a root, or undefined for one that does not exist: nothing can lie under it. */
function realRoot(root: string): string | undefined {
  try {
    return realpathSync(root);
  } catch {
    return undefined;
  }
}

function invalid(path: string, why: string): RootsError {
  return { kind: 'path-invalid', message: `${JSON.stringify(path.slice(0, 120))} ${why}` };
}

function outside(path: string, roots: readonly string[]): RootsError {
  const list = roots.length === 0 ? 'no folder is allowed' : `allowed: ${roots.join(', ')}`;
  return { kind: 'path-outside-roots', message: `${path} is not under an allowed folder; ${list}` };
}

/**
 * The real path behind `path`, if that lies under one of `roots`. Use the result, not `path`: a
 * link may change in between. With `mayBeNew`, the last component need not exist, its folder must.
 * A path that is outside is refused before the filesystem is asked, so nothing is learnt about it.
 */
export function confinePath(
  path: string,
  roots: readonly string[],
  options: { readonly mayBeNew?: boolean } = {},
): Result<string, RootsError> {
  if (!path.startsWith('/') || Buffer.byteLength(path) > PATH_BYTES_MAX) {
    return err(invalid(path, 'is not an absolute path'));
  }
  if (UNTELLABLE.test(path)) return err(invalid(path, 'is not one line'));
  const plain = normalize(path);
  const real = roots.map(realRoot).filter((root) => root !== undefined);
  const isNear = [...roots, ...real].some((root) => isWithin(plain, root));
  if (!isNear) return err(outside(path, roots));
  try {
    const resolved =
      options.mayBeNew === true
        ? join(realpathSync(dirname(plain)), basename(plain))
        : realpathSync(plain);
    if (!real.some((root) => isWithin(resolved, root))) return err(outside(path, roots));
    return UNTELLABLE.test(resolved) ? err(invalid(resolved, 'is not one line')) : ok(resolved);
  } catch (error) {
    const message = `${path} cannot be reached: ${systemCode(error) ?? String(error)}`;
    return err({ kind: 'path-missing', message });
  }
}
