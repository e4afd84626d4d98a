/**
 * Whether a file system keeps holes as fine as a page. Where it allocates larger records, a written
 * page drags its neighbours into "data", and those read zero: a capture would store zeroes over
 * good bytes.
 */
import { randomBytes } from 'node:crypto';
import { open, stat, rm } from 'node:fs/promises';
import { join } from 'node:path';
import { fileExtents } from '../native/guest.ts';
import { err, systemCode } from '../result.ts';
import { PAGE_BYTES } from '../units.ts';
import { hasPage } from './bitmap.ts';
import { orFail, vmmError } from './errors.ts';
import { pageCount } from '../units.ts';

/** 4 MiB, so that a 2 MiB huge page of tmpfs shows. */
const PROBE_PAGES = pageCount(1024);
const WRITTEN_PAGES = [3, 517, 519];

/** Device numbers of file systems that passed. */
const passed = new Set<number>();

/** @throws Failure<VmmError> `memory-file-bad` */
export async function requireFineExtents(directory: string): Promise<void> {
  const device = await deviceOf(directory);
  if (passed.has(device)) return;
  const path = join(directory, `.varve-extents-${randomBytes(8).toString('hex')}`);
  const bad = (problem: string): never =>
    orFail(
      err(vmmError('memory-file-bad', `memory files cannot be put in ${directory}: ${problem}`)),
    );
  const file = await open(path, 'wx+', 0o600).catch((error: unknown) =>
    bad(`creating a file fails (${systemCode(error) ?? String(error)})`),
  );
  try {
    await file.truncate(PROBE_PAGES * PAGE_BYTES);
    const page = Buffer.alloc(PAGE_BYTES, 0xa5);
    for (const index of WRITTEN_PAGES) await file.write(page, 0, PAGE_BYTES, index * PAGE_BYTES);
    await file.datasync();
    const { bits, error } = fileExtents(file.fd, PROBE_PAGES);
    if (error !== 0) bad('its files do not tell holes from data');
    for (let index = 0; index < PROBE_PAGES; index += 1) {
      const written = WRITTEN_PAGES.includes(index);
      if (hasPage({ pageCount: PROBE_PAGES, bits }, index) === written) continue;
      bad('its file system does not keep holes of 4 KiB (use ext4, XFS or tmpfs)');
    }
  } catch (error) {
    const code = systemCode(error);
    if (code === undefined) throw error;
    bad(`writing a file fails (${code})`);
  } finally {
    await file.close();
    await rm(path, { force: true });
  }
  passed.add(device);
}

async function deviceOf(directory: string): Promise<number> {
  try {
    return (await stat(directory)).dev;
  } catch (error) {
    const code = systemCode(error) ?? '';
    return orFail(
      err(vmmError('memory-file-bad', `${directory} cannot be used (${code})`, { code })),
    );
  }
}
