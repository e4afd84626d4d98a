/**
 * Unfinished objects of a store into which several processes, and other hosts, may put at once.
 *
 * U1 A file names the node that writes it, and is locked (flock) from before its first byte until it
 *    is stored or gone. Process ids say nothing: a namespace or a host each has its own.
 * U2 A file that names this node, and that nobody has locked, was left by an earlier process.
 * U3 What cannot be judged stays until it has not been written for a week, or its node is forgotten:
 *    a file of another node, which may be on a host whose locks are not seen here (NFS with local
 *    locks); one that cannot be locked; and one with a name of an older program's.
 */
import { randomUUID } from 'node:crypto';
import { constants, open, opendir, unlink } from 'node:fs/promises';
import type { FileHandle } from 'node:fs/promises';
import { join } from 'node:path';
import { tryLock } from '../native/files.ts';
import { assert, systemCode } from '../result.ts';
import type { NodeId } from '../units.ts';

/** No write for this long: whoever wrote it has stopped. If not, it puts its object once more. */
const UNJUDGED_MS_MAX = 7 * 24 * 60 * 60 * 1000;

const { O_RDONLY, O_NOFOLLOW, O_NONBLOCK } = constants;

/** Closing the file ends its lock. */
export interface UnfinishedFile {
  readonly path: string;
  readonly file: FileHandle;
}

const nodePattern = /^[A-Za-z0-9][A-Za-z0-9_:.-]{0,127}$/;
const namePattern = /^(.+)\.[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$/;

/** A new, empty file of `node`'s. */
export async function createUnfinished(folder: string, node: NodeId): Promise<UnfinishedFile> {
  assert(nodePattern.test(node), `${node} is a node's name`);
  for (;;) {
    const path = join(folder, `${node}.${randomUUID()}`);
    const file = await open(path, 'wx', 0o600);
    try {
      // Somebody who cleans up may have come before the lock: then this is another's, or gone.
      if (tryLock(file.fd, 'exclusive').kind !== 'held' && (await file.stat()).nlink === 1) {
        return { path, file };
      }
    } catch (error) {
      await file.close();
      throw error;
    }
    await file.close();
    await ignoreMissing(unlink(path));
  }
}

/** U2, U3. `nowMs` is compared with the files' times. */
export async function removeUnfinished(folder: string, node: NodeId, nowMs: number): Promise<void> {
  for await (const { name } of await opendir(folder)) {
    await removeUnless(join(folder, name), (lock, modifiedAtMs) => {
      if (lock === 'held') return true;
      const isKnownDead = lock === 'locked' && namePattern.exec(name)?.[1] === node;
      return !isKnownDead && nowMs - modifiedAtMs < UNJUDGED_MS_MAX;
    });
  }
}

/** For a node that will not be back; what a process of its has locked stays. Returns the count. */
export async function removeUnfinishedOf(folder: string, node: NodeId): Promise<number> {
  let count = 0;
  for await (const { name } of await opendir(folder)) {
    if (namePattern.exec(name)?.[1] !== node) continue;
    if (await removeUnless(join(folder, name), (lock) => lock === 'held')) count += 1;
  }
  return count;
}

type Lock = ReturnType<typeof tryLock>['kind'];

/** Under a lock of its own, so that nobody who has just made the file takes it for locked. */
async function removeUnless(
  path: string,
  isKept: (lock: Lock, modifiedAtMs: number) => boolean,
): Promise<boolean> {
  let file: FileHandle;
  try {
    file = await open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
  } catch (error) {
    const code = systemCode(error);
    // Stored or removed meanwhile; or none of the store's.
    if (code === 'ENOENT' || code === 'ELOOP' || code === 'EACCES') return false;
    throw error;
  }
  try {
    const facts = await file.stat();
    if (!facts.isFile() || isKept(tryLock(file.fd, 'shared').kind, facts.mtimeMs)) return false;
    await ignoreMissing(unlink(path));
    return true;
  } finally {
    await file.close();
  }
}

async function ignoreMissing(work: Promise<void>): Promise<void> {
  try {
    await work;
  } catch (error) {
    if (systemCode(error) !== 'ENOENT') throw error;
  }
}
