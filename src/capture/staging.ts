import { chmod, chown, mkdir, rm, type FileHandle } from 'node:fs/promises';
import { dirname, join } from 'node:path';
import type { Config } from '../config/schema.ts';
import { syncDirectory } from '../layer/flatten.ts';
import type { CaptureId, LayerUuid } from '../units.ts';
import { openVmmFile, takeVmmFile, type VmmFileLimits } from '../vmm/vmm-file.ts';
import type { CaptureObserver } from './observer.ts';

/**
 * Where a capture's files are until they are published: ours, and in a folder of its own those that the
 * VMM writes. Of the outer one the VMM may do no more than walk through.
 */
export function stagingFolder(config: Config, captureId: CaptureId): string {
  return join(config.paths.staging, captureId);
}

/** Made before the pause, so that a folder that can't be made stops no VM. */
export async function makeStagingFolder(
  config: Config,
  captureId: CaptureId,
  vmmUid: number,
): Promise<string> {
  const folder = stagingFolder(config, captureId);
  await mkdir(folder, { recursive: true });
  await chmod(folder, 0o711);
  const inner = vmmFolder(folder);
  await mkdir(inner);
  // Not left to the umask. Where we may, it is the VMM's alone.
  const isRoot = process.getuid?.() === 0;
  if (isRoot) await chown(inner, vmmUid, process.getgid?.() ?? 0);
  await chmod(inner, isRoot ? 0o700 : 0o770);
  return folder;
}

/** Where the VMM writes. */
export const vmmFolder = (folder: string): string => join(folder, 'vmm');

/** Our copy of the VM's state. */
export const ownStatePath = (folder: string): string => join(folder, 'vm-state');

/** Takes the VM's state over from the VMM, durable, with the folders that name it. */
export async function takeState(
  folder: string,
  path: string,
  limits: VmmFileLimits,
): Promise<string> {
  const own = ownStatePath(folder);
  await takeVmmFile(path, own, limits);
  await syncDirectory(folder);
  await syncDirectory(dirname(folder));
  return own;
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

  async open(path: string, limits: VmmFileLimits): Promise<void> {
    this.#handle ??= (await openVmmFile(path, limits)).file;
  }

  fd(): number {
    if (this.#handle === undefined) throw new Error('the memory file is not open');
    return this.#handle.fd;
  }

  async close(): Promise<void> {
    await this.#handle?.close();
  }
}
