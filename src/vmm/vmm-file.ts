/**
 * Files that a VMM wrote. It may put anything in their place at any moment: a link to a file of
 * somebody else, a pipe that nobody feeds, a device, a file without end. So each is opened once, without
 * following a link or waiting for anybody; what was opened is looked at, and only that is read.
 */
import { constants } from 'node:fs';
import { open, type FileHandle } from 'node:fs/promises';
import { systemCode } from '../result.ts';
import { err } from '../result.ts';
import { orFail, vmmError } from './errors.ts';

/** Copied at a time. */
const PART_BYTES = 1024 * 1024;

export interface VmmFileLimits {
  /** Of the VMM's process. */
  readonly uid: number;
  /** Larger files are refused, bytes. */
  readonly bytesMax: number;
}

/** The open file, which its caller closes, and its size. Throws what `orFail` throws. */
export async function openVmmFile(
  path: string,
  limits: VmmFileLimits,
): Promise<{ readonly file: FileHandle; readonly sizeBytes: number }> {
  const { O_RDONLY, O_NOFOLLOW, O_NONBLOCK } = constants;
  const file = await open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK).catch((error: unknown) => {
    const code = systemCode(error) ?? String(error);
    return bad(path, code === 'ELOOP' ? 'is a symbolic link' : `cannot be opened (${code})`);
  });
  try {
    const found = await file.stat();
    if (!found.isFile()) bad(path, 'is not a regular file');
    if (found.nlink !== 1) bad(path, `has ${found.nlink} names`);
    if (found.uid !== limits.uid) {
      bad(path, `is of user ${found.uid}, the VMM of user ${limits.uid}`);
    }
    if (found.size > limits.bytesMax) {
      bad(path, `has ${found.size} bytes, more than ${limits.bytesMax}`);
    }
    return { file, sizeBytes: found.size };
  } catch (error) {
    await file.close();
    throw error;
  }
}

/**
 * Copies such a file, as large as it was when it was opened, into a new one of ours, durable, that only
 * we may read. Throws what `orFail` throws; then there is no copy to be used.
 */
export async function takeVmmFile(
  path: string,
  target: string,
  limits: VmmFileLimits,
): Promise<void> {
  const { file, sizeBytes } = await openVmmFile(path, limits);
  try {
    const own = await open(target, 'wx', 0o600);
    try {
      // Not by a system call that copies until the end: a file that is cut meanwhile has none.
      const part = Buffer.alloc(Math.min(sizeBytes, PART_BYTES));
      for (let at = 0; at < sizeBytes;) {
        const { bytesRead } = await file.read(part, 0, Math.min(part.length, sizeBytes - at), at);
        if (bytesRead === 0) bad(path, 'was cut while it was read');
        await own.write(part, 0, bytesRead, at);
        at += bytesRead;
      }
      if ((await file.stat()).size !== sizeBytes) bad(path, 'changed while it was read');
      await own.sync();
    } finally {
      await own.close();
    }
  } finally {
    await file.close();
  }
}

const bad = (path: string, problem: string): never =>
  orFail(err(vmmError('vmm-file-bad', `the VMM's file ${path} ${problem}`)));
