/**
 * Prepared entries: what a fork starts its children from, on this node. An entry is a folder with
 * the VM state and the flat memory, a lease on the layers below it, and the hold that the publish
 * of the fork's capture takes. It is made with the capture, before anything is published, and asks
 * the catalog nothing. It ends once no fork under way and no attached VM uses it: folder first,
 * then lease and share of the hold in one transaction. After a crash it ends at the next start,
 * the other way round: a folder that no attached VM names is then an orphan, which recovery
 * removes.
 */
import { chmod, copyFile, constants, mkdir, rm } from 'node:fs/promises';
import { join } from 'node:path';
import { randomUUID } from 'node:crypto';
import type { Config } from '../config/schema.ts';
import { crashPoint } from '../crash-points.ts';
import { flattenStack } from '../layer/flatten.ts';
import type { PreparedEntry } from '../lineage/epochs.ts';
import type { ChainRef } from '../lineage/layers.queries.ts';
import type { NodeDb } from '../lineage/node-db.ts';
import { holdId, type HoldId } from '../units.ts';
import { failureOf, orThrow } from './failure.ts';
import type { CaptureObserver } from './observer.ts';
import { openChain } from './open-chain.ts';
import { preparedFolder } from './staging.ts';

/** What a VMM's `snapshot/load` takes. */
export interface LaunchFiles {
  readonly memoryPath: string;
  /** Null where the capture has no VM state. */
  readonly vmStatePath: string | null;
}

/** An entry that is being made. */
export class NewEntry implements PreparedEntry, LaunchFiles {
  readonly preparedId: string;
  readonly hold: HoldId;
  readonly folder: string;
  #hasState = false;

  constructor(config: Config, preparedId: string) {
    this.preparedId = preparedId;
    this.hold = holdId(randomUUID());
    this.folder = preparedFolder(config, preparedId);
  }

  get memoryPath(): string {
    return join(this.folder, 'memory');
  }

  get vmStatePath(): string | null {
    return this.#hasState ? join(this.folder, 'vm-state') : null;
  }

  async makeFolder(): Promise<void> {
    await mkdir(this.folder, { recursive: true });
  }

  /**
   * Before the commit point: the publish removes the folder in which the VMM wrote it. A copy, which
   * shares its blocks where the file system can: a file of another user could not be linked. Not
   * synced: no entry of a fork outlives the daemon, but for the files that its children have open.
   */
  async keepState(vmStatePath: string): Promise<void> {
    const copy = join(this.folder, 'vm-state');
    await copyFile(vmStatePath, copy, constants.COPYFILE_FICLONE);
    await chmod(copy, 0o444);
    this.#hasState = true;
    crashPoint('fork-state-kept');
  }

  /**
   * Writes the memory that a chain of local layers holds. Their headers, indexes, sizes and uuids are
   * checked against node.db, not their digests: this daemon hashed each when it sealed or fetched it,
   * and the same files are what captures compare with and sit on. Source: ADR 0044. The children may be
   * of other users: its folder decides who may enter.
   */
  async flatten(chain: ChainRef, signal: AbortSignal): Promise<void> {
    await using stack = orThrow(await openChain(chain));
    orThrow(await flattenStack(stack, { path: this.memoryPath, signal, mode: 0o644 }));
  }
}

export interface PreparedEntriesDeps {
  readonly config: Config;
  readonly nodeDb: NodeDb;
  readonly observer: CaptureObserver;
}

export class PreparedEntries {
  readonly #deps: PreparedEntriesDeps;
  readonly #underWay = new Set<string>();

  constructor(deps: PreparedEntriesDeps) {
    this.#deps = deps;
  }

  /** Nothing ends the entry until its fork says that it is over. */
  begin(preparedId: string): NewEntry {
    this.#underWay.add(preparedId);
    return new NewEntry(this.#deps.config, preparedId);
  }

  /** The fork is over: VMs use the entry, or nobody does. */
  async end(preparedId: string): Promise<void> {
    this.#underWay.delete(preparedId);
    await this.settle(preparedId);
  }

  /** After a need has ended. Never rejects: what could not be removed goes at the next start. */
  async settle(preparedId: string): Promise<void> {
    const { config, nodeDb, observer } = this.#deps;
    if (this.#underWay.has(preparedId) || nodeDb.isPreparedUsed(preparedId)) return;
    try {
      await rm(preparedFolder(config, preparedId), { recursive: true, force: true });
      orThrow(nodeDb.endNeed('prepared', preparedId));
    } catch (error) {
      const facts = { preparedId, error: failureOf(error) };
      observer.warn('a prepared entry could not be removed', facts);
    }
  }
}
