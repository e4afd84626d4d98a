/** Two memory files, page by page. */
import { open, type FileHandle } from 'node:fs/promises';
import { MIB, PAGE_BYTES } from '../units.ts';

export interface Comparison {
  readonly pages: number;
  readonly differing: number;
  /** Image page of the first difference; null where there is none. */
  readonly firstDiffering: number | null;
}

const CHUNK_BYTES = 4 * MIB;

/** Files of different sizes differ in every page that only one of them has. */
export async function compareMemory(
  onePath: string,
  otherPath: string,
  signal: AbortSignal,
): Promise<Comparison> {
  await using one = await open(onePath, 'r');
  await using other = await open(otherPath, 'r');
  const size = Math.max((await one.stat()).size, (await other.stat()).size);
  const pages = Math.ceil(size / PAGE_BYTES);
  const a = Buffer.alloc(CHUNK_BYTES);
  const b = Buffer.alloc(CHUNK_BYTES);
  let differing = 0;
  let firstDiffering: number | null = null;
  for (let offset = 0; offset < size; offset += CHUNK_BYTES) {
    signal.throwIfAborted();
    const [here, there] = await Promise.all([fill(one, a, offset), fill(other, b, offset)]);
    if (here === there && a.subarray(0, here).equals(b.subarray(0, there))) continue;
    for (let at = 0; at < Math.max(here, there); at += PAGE_BYTES) {
      const mine = a.subarray(at, Math.min(at + PAGE_BYTES, here));
      const yours = b.subarray(at, Math.min(at + PAGE_BYTES, there));
      if (mine.equals(yours)) continue;
      differing += 1;
      firstDiffering ??= (offset + at) / PAGE_BYTES;
    }
  }
  return { pages, differing, firstDiffering };
}

/** Reads until the buffer is full or the file ends; returns the bytes read. */
async function fill(file: FileHandle, buffer: Buffer, offset: number): Promise<number> {
  let done = 0;
  while (done < buffer.length) {
    const { bytesRead } = await file.read(buffer, done, buffer.length - done, offset + done);
    if (bytesRead === 0) break;
    done += bytesRead;
  }
  return done;
}
