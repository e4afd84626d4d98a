import { open } from 'node:fs/promises';
import Sqlite from 'better-sqlite3';
import type { Database } from 'better-sqlite3';
import type { Clock } from '../clock.ts';
import type { FailureDetail, Result } from '../result.ts';
import { err, Failure, ok, systemCode } from '../result.ts';
import type { CaptureId, HoldId, LayerUuid, SnapshotId, VmId } from '../units.ts';
import * as compactions from './compactions.queries.ts';
import type { ChainSwap, PendingCompaction } from './compactions.queries.ts';
import * as epochs from './epochs.ts';
import type {
  AbortOptions,
  BeginOptions,
  CreatedJob,
  EpochIntent,
  FetchedPages,
  PreparedEntry,
} from './epochs.ts';
import type { NodeDbError } from './failures.ts';
import { refuse } from './failures.ts';
import * as holds from './holds.queries.ts';
import type { HoldOwner, Need, OwnedHold } from './holds.queries.ts';
import * as jobs from './jobs.queries.ts';
import type { CaptureJob, JobQuery, NewJob } from './jobs.queries.ts';
import * as layers from './layers.queries.ts';
import type { ChainRef, CondemnedLayer, LayerFlags, LayerRef } from './layers.queries.ts';
import type { Lease, LeaseHolder, LocalLayer } from './layers.queries.ts';
import { readLedger } from './ledger.queries.ts';
import { warmUp } from './page-sets.ts';
import type { PageSets } from './page-sets.ts';
import * as releases from './releases.queries.ts';
import type { PendingRelease } from './releases.queries.ts';
import { bringUpToDate } from './schema.ts';
import * as suspects from './suspects.queries.ts';
import type { PendingSuspect } from './suspects.queries.ts';
import * as vms from './vms.queries.ts';
import type { AttachVm, VmRecord } from './vms.queries.ts';

type Outcome<T> = Result<T, NodeDbError>;

/** Keeps the write-ahead log from growing past this after a checkpoint. */
const journalBytesMax = 64 * 1024 * 1024;

/**
 * node.db: what this daemon knows of its VMs, durably. One connection, WAL, synchronous FULL: a method
 * that returned is on the disk; one that returned an error changed nothing. Calls block for one fsync.
 * `recordSetAsync` alone does not block, and may have recorded its set where it returned an error.
 * The file is locked for as long as it is open, so that two daemons never drive the same VMs.
 */
export class NodeDb {
  readonly #db: Database;
  readonly #clock: Clock;

  private constructor(db: Database, clock: Clock) {
    this.#db = db;
    this.#clock = clock;
  }

  static open(path: string, clock: Clock): Outcome<NodeDb> {
    let db: Database | undefined;
    try {
      db = new Sqlite(path, { timeout: 0 });
      db.pragma('locking_mode = EXCLUSIVE');
      db.pragma('journal_mode = WAL');
      db.pragma('synchronous = FULL');
      db.pragma('foreign_keys = ON');
      db.pragma(`journal_size_limit = ${journalBytesMax}`);
      db.exec('BEGIN IMMEDIATE; COMMIT');
      bringUpToDate(db);
      db.transaction(() => vms.detachDoubles(db as Database, clock.nowMs())).immediate();
      warmUp();
      return ok(new NodeDb(db, clock));
    } catch (error) {
      db?.close();
      return err(asNodeDbError(error, path));
    }
  }

  close(): void {
    this.#db.close();
  }

  [Symbol.dispose](): void {
    this.close();
  }

  /** Bounds the file, in pages of 4096 bytes: past it, changes fail as on a full disk. */
  limitPages(count: number): void {
    this.#db.pragma(`max_page_count = ${count}`);
  }

  /** One IMMEDIATE transaction; a refusal thrown inside undoes it and is returned. */
  #change<T>(work: (db: Database, nowMs: number) => T): Outcome<T> {
    const db = this.#db;
    try {
      return ok(db.transaction(() => work(db, this.#clock.nowMs())).immediate());
    } catch (error) {
      return err(asNodeDbError(error, db.name));
    }
  }

  // VMs

  /** Idempotent for the same process under the same id. */
  attachVm(v: Omit<AttachVm, 'nowMs'>): Outcome<VmRecord> {
    return this.#change((db, nowMs) => vms.attach(db, { ...v, nowMs }));
  }

  getVm(vmId: VmId): VmRecord | undefined {
    return vms.findVm(this.#db, vmId);
  }

  listVms(): VmRecord[] {
    return vms.listVms(this.#db);
  }

  launchChain(vmId: VmId): ChainRef | null {
    return layers.chainOf(this.#db, this.getVm(vmId)?.launchHead ?? null);
  }

  memoryChain(vmId: VmId): ChainRef | null {
    return layers.chainOf(this.#db, this.getVm(vmId)?.memoryHead ?? null);
  }

  /**
   * Refused while a capture is active. Returns the record as it was. If nobody else owns its hold, the
   * release is queued.
   */
  detachVm(vmId: VmId): Outcome<VmRecord> {
    return this.#change((db, nowMs) => {
      const vm = vms.requireVm(db, vmId);
      const running = jobs.activeJob(db, vmId)?.captureId ?? vm.pausedBy;
      if (running !== null) {
        refuse({
          kind: 'capture-running',
          message: `capture ${running} is running on VM ${vmId}`,
          runningCaptureId: running,
        });
      }
      vms.detach(db, vmId, nowMs);
      return vm;
    });
  }

  // Epochs: the protocol and its invariants are in epochs.ts

  createJob(job: NewJob): Outcome<CreatedJob> {
    return this.#change((db) => epochs.createJob(db, job));
  }

  begin(vmId: VmId, captureId: CaptureId, o: BeginOptions): Outcome<EpochIntent> {
    return this.#change((db, nowMs) => epochs.begin(db, vmId, captureId, o, nowMs));
  }

  markPaused(vmId: VmId, captureId: CaptureId): Outcome<void> {
    return this.#change((db, nowMs) => epochs.markPaused(db, vmId, captureId, nowMs));
  }

  /** Sets one member of what `attachVm` was given as `factsJson`. */
  setVmFact(vmId: VmId, name: string, json: string): Outcome<void> {
    return this.#change((db) => vms.setFact(db, vmId, name, json));
  }

  clearPaused(vmId: VmId, captureId: CaptureId): Outcome<void> {
    return this.#change((db) => epochs.clearPaused(db, vmId, captureId));
  }

  /**
   * As `recordSet`; on the disk once the promise resolves, without blocking for it. The commit writes
   * the WAL; what FULL would do then, one sync of that file, happens on another thread. A crash in
   * between finds the set recorded or not, as one during `recordSet` does.
   */
  async recordSetAsync(captureId: CaptureId, fetched: FetchedPages): Promise<Outcome<PageSets>> {
    const db = this.#db;
    db.pragma('synchronous = NORMAL');
    let recorded: Outcome<PageSets>;
    try {
      recorded = this.recordSet(captureId, fetched);
    } finally {
      db.pragma('synchronous = FULL');
    }
    if (!recorded.ok) return recorded;
    const walPath = `${db.name}-wal`;
    try {
      const wal = await open(walPath, 'r');
      try {
        await wal.datasync();
      } finally {
        await wal.close();
      }
    } catch (error) {
      const code = systemCode(error) ?? '';
      const message = `${walPath} could not be flushed (${code})`;
      return err({ kind: 'node-db-io', message, code });
    }
    return recorded;
  }

  /** What `recordSet` would return; writes nothing. */
  joinSet(captureId: CaptureId, fetched: FetchedPages): Outcome<PageSets> {
    return this.#change((db) => epochs.joinSet(db, captureId, fetched));
  }

  recordSet(captureId: CaptureId, fetched: FetchedPages): Outcome<PageSets> {
    return this.#change((db, nowMs) => epochs.recordSet(db, captureId, fetched, nowMs));
  }

  /** Whatever a crash before the commit would otherwise lose; returned with the job. */
  sealed(captureId: CaptureId, layer: LayerRef, kept: epochs.SealedFacts = {}): Outcome<void> {
    return this.#change((db, nowMs) => epochs.sealed(db, captureId, layer, kept, nowMs));
  }

  /** With `entry`, what is committed is leased for it at once, and it owns its hold. */
  commit(captureId: CaptureId, entry: PreparedEntry | null = null): Outcome<CaptureJob> {
    return this.#change((db, nowMs) => epochs.commit(db, captureId, entry, nowMs));
  }

  published(captureId: CaptureId, snapshot: SnapshotId): Outcome<CaptureJob> {
    return this.#change((db, nowMs) => epochs.published(db, captureId, snapshot, nowMs));
  }

  abort(captureId: CaptureId, failure: FailureDetail, o: AbortOptions = {}): Outcome<CaptureJob> {
    return this.#change((db, nowMs) => epochs.abort(db, captureId, failure, o, nowMs));
  }

  /** What is in no committed layer yet. Throws Failure where it is damaged. */
  ledger(vmId: VmId): PageSets | null {
    return readLedger(this.#db, vmId);
  }

  // Jobs

  getJob(captureId: CaptureId): CaptureJob | undefined {
    return jobs.findJob(this.#db, captureId);
  }

  /** Whether a capture has this idempotency key. */
  hasJobOf(idempotencyKey: string): boolean {
    return jobs.findJobByKey(this.#db, idempotencyKey) !== undefined;
  }

  listJobs(query: JobQuery): CaptureJob[] {
    return jobs.listJobs(this.#db, query);
  }

  /** Neither published nor aborted, oldest first. */
  unfinishedJobs(): CaptureJob[] {
    return jobs.unfinishedJobs(this.#db);
  }

  /** Captures whose epoch is committed and whose snapshot is still to be published. */
  countCommitted(): number {
    return jobs.countCommitted(this.#db);
  }

  setResult(captureId: CaptureId, resultJson: string): Outcome<void> {
    return this.#change((db) => {
      jobs.requireJob(db, captureId);
      jobs.setResult(db, captureId, resultJson);
    });
  }

  /** Forgets old published and aborted jobs, at most `limit`; returns how many. */
  trimJobs(beforeMs: number, limit: number): Outcome<number> {
    return this.#change((db) => jobs.trimJobs(db, beforeMs, limit));
  }

  /** Layers of the capture's chain that the catalog does not have yet, predecessors first. */
  layersToPublish(captureId: CaptureId): LocalLayer[] {
    const layer = jobs.findJob(this.#db, captureId)?.layer ?? null;
    return layer === null ? [] : layers.unpublishedLayers(this.#db, layer.uuid);
  }

  /** The catalog has forgotten these layers. */
  markUnpublished(uuids: readonly LayerUuid[]): Outcome<void> {
    return this.#change((db) => layers.markUnpublished(db, uuids));
  }

  // Local layers and leases

  /** Only of layers that were captured on this node and are still here as captured. */
  epochsOf(uuids: readonly LayerUuid[]): ReadonlyMap<LayerUuid, number> {
    return layers.epochsOf(this.#db, uuids);
  }

  findLayer(uuid: LayerUuid): LocalLayer | undefined {
    return layers.findLayer(this.#db, uuid);
  }

  localLayers(): LocalLayer[] {
    return layers.listLayers(this.#db);
  }

  chainOf(head: LayerUuid): ChainRef | null {
    return layers.chainOf(this.#db, head);
  }

  /** Takes files up that others made (a fetched chain, bottom to top), leased from the start. */
  addChain(
    chain: readonly LayerRef[],
    flags: LayerFlags,
    lease: { readonly holder: LeaseHolder; readonly holderId: string },
  ): Outcome<LayerUuid | null> {
    return this.#change((db, nowMs) => {
      const head = layers.addChain(db, chain, flags);
      if (head !== null) layers.takeLease(db, lease.holder, lease.holderId, head, nowMs);
      return head;
    });
  }

  takeLease(holder: LeaseHolder, holderId: string, head: LayerUuid): Outcome<void> {
    return this.#change((db, nowMs) => layers.takeLease(db, holder, holderId, head, nowMs));
  }

  dropLeases(holder: LeaseHolder, holderId: string): Outcome<number> {
    return this.#change((db) => layers.dropLeases(db, holder, holderId));
  }

  leases(): Lease[] {
    return layers.listLeases(this.#db);
  }

  /** Condemns what nothing needs; returns all that is condemned and not yet forgotten. */
  condemnLayers(): Outcome<CondemnedLayer[]> {
    return this.#change((db, nowMs) => {
      layers.condemnLayers(db, nowMs);
      return layers.condemnedLayers(db);
    });
  }

  /** After their files are gone; top down. */
  forgetLayers(uuids: readonly LayerUuid[]): Outcome<void> {
    return this.#change((db) => layers.forgetLayers(db, uuids));
  }

  // Compaction of memory parents: the invariants are in compactions.queries.ts

  beginCompaction(vmId: VmId, id: string): Outcome<ChainRef> {
    return this.#change((db, nowMs) => compactions.begin(db, vmId, id, nowMs));
  }

  /** Before the file is made; it goes again unless the chain is swapped. */
  addCompactionFile(id: string, path: string): Outcome<void> {
    return this.#change((db) => compactions.addFile(db, id, path));
  }

  swapChain(id: string, swap: ChainSwap): Outcome<ChainRef> {
    return this.#change((db) => compactions.swap(db, id, swap));
  }

  /** After its files are gone. */
  abandonCompaction(id: string): Outcome<void> {
    return this.#change((db) => compactions.abandon(db, id));
  }

  pendingCompactions(): PendingCompaction[] {
    return compactions.pending(this.#db);
  }

  // Catalog holds: the invariants are in holds.queries.ts

  /** Before the catalog is asked for it. */
  ownHold(hold: HoldId, owner: HoldOwner): Outcome<void> {
    return this.#change((db) => holds.addOwner(db, hold, owner));
  }

  isHoldOwned(hold: HoldId): boolean {
    return holds.isOwned(this.#db, hold);
  }

  holdOwners(): OwnedHold[] {
    return holds.listOwners(this.#db);
  }

  /** Drops its leases and its share of holds; queues the release of those that were its alone. */
  endNeed(need: Need, id: string): Outcome<void> {
    return this.#change((db, nowMs) => holds.endNeed(db, need, id, nowMs));
  }

  /** At start-up: what was under way in an earlier life is not. */
  endEarlierNeeds(): Outcome<void> {
    return this.#change((db, nowMs) => holds.endEarlierNeeds(db, nowMs));
  }

  isPreparedUsed(preparedId: string): boolean {
    return holds.isPreparedUsed(this.#db, preparedId);
  }

  // Their releases

  queueRelease(hold: HoldId): Outcome<void> {
    return this.#change((db, nowMs) => releases.queueRelease(db, hold, nowMs));
  }

  pendingReleases(limit: number): PendingRelease[] {
    return releases.pendingReleases(this.#db, limit);
  }

  countReleases(): number {
    return releases.countReleases(this.#db);
  }

  releaseTried(hold: HoldId): Outcome<void> {
    return this.#change((db) => releases.releaseTried(db, hold));
  }

  releaseDone(hold: HoldId): Outcome<void> {
    return this.#change((db) => releases.releaseDone(db, hold));
  }

  // Layers that lack pages

  /** As `suspects.queries.ts` says; the next capture widens. Returns the layers that were queued. */
  pagesLost(vmId: VmId, reason: string): Outcome<LayerUuid[]> {
    return this.#change((db, nowMs) => suspects.pagesLost(db, vmId, reason, nowMs));
  }

  /** Committed captures of a VM since the last that looked at every page; counted up to `limit`. */
  countUnverified(vmId: VmId, limit: number): number {
    return suspects.capturesSinceComplete(this.#db, vmId, limit).length;
  }

  pendingSuspects(limit: number): PendingSuspect[] {
    return suspects.pendingSuspects(this.#db, limit);
  }

  countSuspects(): number {
    return suspects.countSuspects(this.#db);
  }

  isUnpublished(layer: LayerUuid): boolean {
    return layers.findLayer(this.#db, layer)?.published === false;
  }

  suspectTried(layer: LayerUuid): Outcome<void> {
    return this.#change((db) => suspects.suspectTried(db, layer));
  }

  suspectDone(layer: LayerUuid): Outcome<void> {
    return this.#change((db) => suspects.suspectDone(db, layer));
  }
}

function asNodeDbError(error: unknown, path: string): NodeDbError {
  if (error instanceof Failure) return error.detail as NodeDbError;
  if (!(error instanceof Sqlite.SqliteError)) {
    // better-sqlite3 throws a TypeError where the folder does not exist; the rest are bugs.
    if (error instanceof TypeError && error.message.includes('directory does not exist')) {
      return { kind: 'node-db-io', message: `${path}: ${error.message}`, code: 'ENOENT' };
    }
    throw error;
  }
  const { code, message } = error;
  if (code.startsWith('SQLITE_BUSY') || code.startsWith('SQLITE_LOCKED')) {
    return { kind: 'node-db-locked', message: `${path} is in use by another process` };
  }
  if (code.startsWith('SQLITE_CORRUPT') || code === 'SQLITE_NOTADB') {
    return { kind: 'node-db-corrupt', message: `${path}: ${message}` };
  }
  if (code.startsWith('SQLITE_CONSTRAINT') || code === 'SQLITE_ERROR') throw error;
  return { kind: 'node-db-io', message: `${path}: ${message} (${code})`, code };
}
