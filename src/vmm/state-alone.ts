/**
 * The VM state without a memory file, of a VMM that has no such request. Firecracker writes the
 * state first and opens the memory file after it: one that cannot be opened is refused with the
 * state complete, and nothing else done. It documents neither, so the first such refusal is only
 * believed where it names the memory file and the state ends with its own checksum.
 */
import { lstat, rm } from 'node:fs/promises';
import { dirname, join } from 'node:path';
import { crc64 } from '../crc64.ts';
import type { VmmClient } from './client.ts';
import { orFail, type VmmError } from './errors.ts';
import { openVmmFile } from './vmm-file.ts';

/** Real ones are some ten KiB; a larger one is not looked through in a pause. */
const STATE_BYTES_MAX = 4 * 1024 * 1024;

export class StateAlone {
  readonly #client: VmmClient;
  readonly #uid: number;
  #works: boolean | null = null;

  /** @param uid of the VMM's process */
  constructor(client: VmmClient, uid: number) {
    this.#client = client;
    this.#uid = uid;
  }

  /** Null until it was tried. */
  get works(): boolean | null {
    return this.#works;
  }

  /**
   * True once the state of the paused VM is in its file; false where this VMM does not do it, with
   * nothing left behind. Throws what `orFail` throws for anything but a refusal.
   * @param memFilePath a new path; the one that is sent is below it, where there is no folder
   */
  async save(
    files: { readonly snapshotPath: string; readonly memFilePath: string },
    signal: AbortSignal,
  ): Promise<boolean> {
    if (this.#works === false) return false;
    const { snapshotPath, memFilePath } = files;
    const nowhere = join(dirname(memFilePath), 'no-such-folder');
    const request = { snapshotPath, memFilePath: join(nowhere, 'memory') };
    const made = await this.#client.createSnapshot({ type: 'Full', ...request }, signal);
    if (!made.ok && made.error.kind !== 'vmm-refused') orFail(made);
    if (!made.ok && namesMemoryFile(made.error) && (await this.#isWhole(snapshotPath))) {
      this.#works = true;
      return true;
    }
    this.#works = false;
    await rm(snapshotPath, { force: true });
    await rm(nowhere, { recursive: true, force: true });
    return false;
  }

  /** Looked through once per VMM; later the refusal says enough. */
  async #isWhole(path: string): Promise<boolean> {
    if ((await lstat(path).catch(() => null)) === null) return false;
    const limits = { uid: this.#uid, bytesMax: STATE_BYTES_MAX };
    const { file, sizeBytes } = await openVmmFile(path, limits);
    try {
      if (sizeBytes === 0) return false;
      if (this.#works === true) return true;
      // No more than there was: it may grow meanwhile.
      const state = Buffer.alloc(sizeBytes);
      const { bytesRead } = await file.read(state, 0, sizeBytes, 0);
      return bytesRead === sizeBytes && crc64(state) === 0n;
    } finally {
      await file.close();
    }
  }
}

function namesMemoryFile({ fault }: VmmError): boolean {
  return /memory (backing )?file/i.test(fault ?? '');
}
