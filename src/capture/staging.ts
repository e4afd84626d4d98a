import { mkdir, open, rm, type FileHandle } from 'node:fs/promises';
import { dirname, join } from 'node:path';
import type { Config } from '../config/schema.ts';
import { syncDirectory } from '../layer/flatten.ts';
import type { CaptureId, LayerUuid } from '../units.ts';
import type { CaptureObserver } from './observer.ts';

/** Where a capture's VM state and memory files are, until they are published. */
export function stagingFolder(config: Config, captureId: CaptureId): string {
  return join(config.paths.staging, captureId);
}

/** Made before the pause, so that a folder that can't be made stops no VM. */
export async function makeStagingFolder(config: Config, captureId: CaptureId): Promise<string> {
  const folder = stagingFolder(config, captureId);
  await mkdir(folder, { recursive: true, mode: 0o770 });
  return folder;
}

/** A file that a VMM wrote in the staging folder of a capture, with the folders that name it. */
export async function makeDurable(path: string): Promise<void> {
  await using file = await open(path, 'r');
  await file.sync();
  await syncDirectory(dirname(path));
  await syncDirectory(dirname(dirname(path)));
}

/**
 * Removes what nothing names any more, folders with all they hold. What cannot be removed is told,
 * keeps nothing from going on, and is tried again when the daemon starts.
 */
export async function removeLeftovers(
  paths: readonly string[],
  observer: Pick<CaptureObserver, 'warn'>,
): Promise<void> {
  for (const path of paths) {
    try {
      await rm(path, { recursive: true, force: true });
    } catch (error) {
      observer.warn('a file that nothing needs could not be removed', { path, error });
    }
  }
}

/** How names of whole layers end. */
export const LAYER_SUFFIX = '.lsmt';

export function layerPath(config: Config, uuid: LayerUuid): string {
  return join(config.paths.layers, `${uuid}${LAYER_SUFFIX}`);
}

/** Where prepared entries are. */
export function preparedRoot(config: Config): string {
  return join(config.paths.state, 'prepared');
}

/** Where one entry's memory file is, for as long as a VM that was started from it is attached. */
export function preparedFolder(config: Config, preparedId: string): string {
  return join(preparedRoot(config), preparedId);
}

/** The memory file of a VMM that hands out bytes, opened when the first batch needs it. */
export class LazyFile {
  #handle: FileHandle | undefined;

  async open(path: string): Promise<void> {
    this.#handle ??= await open(path, 'r');
  }

  fd(): number {
    if (this.#handle === undefined) throw new Error('the memory file is not open');
    return this.#handle.fd;
  }

  async close(): Promise<void> {
    await this.#handle?.close();
  }
}
