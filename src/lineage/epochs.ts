/**
 * The protocol of an epoch (DESIGN §5) as a state machine over the capture's recorded step. Every
 * function here runs inside one durable transaction; an event that is not in the table is refused as
 * `capture-step` and changes nothing.
 *
 * | step \ event | begin    | recordSet | sealed | commit    | published | abort            |
 * |--------------|----------|-----------|--------|-----------|-----------|------------------|
 * | created      | intended | –         | –      | –         | –         | aborted          |
 * | intended     | –        | recorded  | –      | –         | –         | aborted (I4)     |
 * | recorded     | –        | recorded  | sealed | –         | –         | aborted          |
 * | sealed       | –        | –         | –      | committed | –         | aborted          |
 * | committed    | –        | –         | –      | committed | published | –                |
 * | published    | –        | –         | –      | published | published | –                |
 * | aborted      | –        | –         | –      | –         | –         | aborted          |
 *
 * `committed`, `published` and `aborted` answer their own event again without doing anything, so that
 * a caller that died after the transaction may repeat it. A second `recordSet` in `recorded` is a
 * further round of pre-copy. Invariants, each tested by name in test/lineage/epochs.test.ts:
 *
 * - I1 At most one capture of a VM is in an active step (created, intended, recorded, sealed).
 * - I2 After `recordSet`, ledger = fetched set ∪ what earlier uncommitted epochs left (S1 to S4 of
 *      page-sets.ts). Nothing leaves the ledger but by I3.
 * - I3 Commit is one transaction: layer known, memory parent := layer, epoch + 1, ledger cleared, step
 *      committed; all or nothing. Where the capture does not advance, the memory parent and the
 *      ledger stay, since the next layer sits on the same parent again.
 * - I4 A capture that ends in `intended`, from a source that clears on read, may have lost its set:
 *      the VM is marked lost, and each `begin` says widen until a widened set is in the ledger.
 *      Sources that do not clear lose nothing.
 * - I5 Where a fetch carries the bytes of its own pages only (`bytesIn: 'file'`), the ledger's pages
 *      cannot be read any more: `begin` says widen while the ledger is not empty.
 * - I6 An aborted capture leaves memory parent, epoch and ledger as `recordSet` left them.
 * - I7 Only the capture that paused a VM is named in paused_by, and only while it is so; no other
 *      capture begins meanwhile.
 * - I8 A sealed layer sits on the memory parent of its intent, which is still the VM's at commit.
 * - I9 `begin` refuses, before any pause, a chain that the new layer would take past 255.
 * - I10 A capture's lease holds the memory parent from `begin` to commit or abort, and its own chain
 *      from commit to `published`.
 * - I11 What a fork starts its children from is leased, and its hold owned, by the transaction that
 *      commits its capture: there is no moment in which the layer could be deleted.
 */
import type { Database } from 'better-sqlite3';
import type { FailureDetail } from '../result.ts';
import { assert } from '../result.ts';
import { CHAIN_LAYERS_MAX, pagesExact, pagesToBytes } from '../units.ts';
import type { CaptureId, HoldId, SnapshotId, VmId } from '../units.ts';
import { refuse } from './failures.ts';
import { addOwner } from './holds.queries.ts';
import { activeJob, insertJob, findJobByKey, requireJob, setFailure } from './jobs.queries.ts';
import { setIntent, setLayer, setResult, setSnapshot, setStep } from './jobs.queries.ts';
import type { CaptureJob, CaptureStep, NewJob } from './jobs.queries.ts';
import { addLayer, chainOf, dropLeases, findLayer } from './layers.queries.ts';
import { markPublished, refuseDepth, takeLease } from './layers.queries.ts';
import type { ChainRef, LayerRef } from './layers.queries.ts';
import { clearLedger, hasLedger, readLedger, writeLedger } from './ledger.queries.ts';
import { bitmapProblem, joinSets } from './page-sets.ts';
import type { PageSets } from './page-sets.ts';
import { clearLost, nextEpoch, requireVm, setImageBytes, setLost } from './vms.queries.ts';
import { setPaused, setReadCleared } from './vms.queries.ts';
import type { VmRecord } from './vms.queries.ts';

export interface BeginOptions {
  /** Reading the source clears it (KVM dirty log behind snapshot/create, VMM-side epochs, …). */
  readonly clearsOnRead: boolean;
  /** What a committed epoch named is not named again, as with the VMM's own epochs. */
  readonly forgetsCommitted: boolean;
  /** Where the bytes of a page are: in the process, or only in the file that the fetch wrote. */
  readonly bytesIn: 'process' | 'file';
  /** False: the memory parent stays (`lineage.advance = false`). */
  readonly advance: boolean;
  /** Files that the capture may write and that an abort must remove. */
  readonly scratchPaths?: readonly string[];
}

export interface EpochIntent {
  readonly epoch: number;
  /** What the new layer sits on; null for a base. */
  readonly memoryParent: ChainRef | null;
  /**
   * Set: the dirty set alone might miss a page. Select every page whose content may differ from the
   * memory parent (all resident ones and, as zero, those known absent; or simply all).
   */
  readonly widen: { readonly reason: string } | null;
  /** Aborted epochs left pages in the ledger. */
  readonly carriesOver: boolean;
}

export interface FetchedPages extends PageSets {
  /** The set is the wide one that the intent asked for. */
  readonly widened?: boolean;
}

function expectStep(job: CaptureJob, event: string, allowed: readonly CaptureStep[]): void {
  if (allowed.includes(job.step)) return;
  refuse({
    kind: 'capture-step',
    message: `capture ${job.captureId} is ${job.step}: ${event} needs ${allowed.join(' or ')}`,
    step: job.step,
  });
}

function refuseRunning(vmId: VmId, running: CaptureId): never {
  refuse({
    kind: 'capture-running',
    message: `capture ${running} is running on VM ${vmId}`,
    runningCaptureId: running,
  });
}

export interface CreatedJob {
  readonly job: CaptureJob;
  /** False: the idempotency key was seen before with this request; `job` is that one. */
  readonly created: boolean;
}

/** I1; and a repeated idempotency key finds its job, whatever became of it. */
export function createJob(db: Database, request: NewJob): CreatedJob {
  const key = request.idempotencyKey ?? null;
  const earlier = key === null ? undefined : findJobByKey(db, key);
  if (earlier !== undefined) {
    const same =
      earlier.vmId === request.vmId &&
      earlier.kind === (request.kind ?? 'capture') &&
      earlier.requestJson === request.requestJson;
    if (same) return { job: earlier, created: false };
    refuse({
      kind: 'idempotency-conflict',
      message: `idempotency key ${JSON.stringify(key)} was used for another request`,
    });
  }
  const vm = requireVm(db, request.vmId);
  const running = activeJob(db, request.vmId);
  if (running !== undefined) refuseRunning(request.vmId, running.captureId);
  if (vm.pausedBy !== null) refuseRunning(request.vmId, vm.pausedBy);
  insertJob(db, request);
  return { job: requireJob(db, request.captureId), created: true };
}

function widenReason(db: Database, vm: VmRecord, o: BeginOptions): string | null {
  const forgets = o.clearsOnRead || o.forgetsCommitted;
  if (vm.lostReason !== null && (forgets || !vm.lostIfClearing)) return vm.lostReason;
  if (o.bytesIn === 'file' && hasLedger(db, vm.vmId)) {
    return 'pages of an earlier epoch were only in its memory file';
  }
  return null;
}

/** Step 1. */
export function begin(
  db: Database,
  vmId: VmId,
  captureId: CaptureId,
  o: BeginOptions,
  nowMs: number,
): EpochIntent {
  const vm = requireVm(db, vmId);
  const job = requireJob(db, captureId);
  assert(job.vmId === vmId, 'a capture begins on its own VM');
  expectStep(job, 'begin', ['created']);
  if (vm.pausedBy !== null) refuseRunning(vmId, vm.pausedBy);
  const memoryParent = chainOf(db, vm.memoryHead);
  const depth = (memoryParent?.depth ?? 0) + 1;
  if (depth > CHAIN_LAYERS_MAX) refuseDepth(`VM ${vmId}`, depth);
  const reason = widenReason(db, vm, o);
  setIntent(db, captureId, {
    epoch: vm.epoch,
    parentUuid: vm.memoryHead,
    clearsOnRead: o.clearsOnRead,
    bytesIn: o.bytesIn,
    advance: o.advance,
    widenReason: reason,
    scratchPaths: o.scratchPaths ?? [],
  });
  if (o.clearsOnRead || o.forgetsCommitted) setReadCleared(db, vmId);
  if (vm.memoryHead !== null) takeLease(db, 'capture', captureId, vm.memoryHead, nowMs);
  setStep(db, captureId, 'intended', nowMs);
  return {
    epoch: vm.epoch,
    memoryParent,
    widen: reason === null ? null : { reason },
    carriesOver: hasLedger(db, vmId),
  };
}

/** I7. Before the pause is sent. */
export function markPaused(db: Database, vmId: VmId, captureId: CaptureId, nowMs: number): void {
  const vm = requireVm(db, vmId);
  const job = requireJob(db, captureId);
  assert(job.vmId === vmId, 'a capture pauses its own VM');
  if (vm.pausedBy !== null && vm.pausedBy !== captureId) refuseRunning(vmId, vm.pausedBy);
  expectStep(job, 'markPaused', ['intended', 'recorded']);
  setPaused(db, vmId, captureId, nowMs);
}

/** I7. After the resume was answered, or the VM is known to run or to be gone. */
export function clearPaused(db: Database, vmId: VmId, captureId: CaptureId): void {
  const vm = requireVm(db, vmId);
  if (vm.pausedBy === null) return;
  if (vm.pausedBy !== captureId) refuseRunning(vmId, vm.pausedBy);
  setPaused(db, vmId, null, null);
}

function checkSets(vm: VmRecord, sets: PageSets): void {
  const { pageCount } = sets.selected;
  for (const bitmap of sets.zero === null ? [sets.selected] : [sets.selected, sets.zero]) {
    const problem =
      bitmap.pageCount === pageCount
        ? bitmapProblem(bitmap)
        : `zero set of ${bitmap.pageCount} pages beside ${pageCount} selected`;
    if (problem !== null) {
      refuse({ kind: 'layout-changed', message: `VM ${vm.vmId}: ${problem}` });
    }
  }
  if (vm.imageBytes !== null && pagesExact(vm.imageBytes) !== pageCount) {
    refuse({
      kind: 'layout-changed',
      message: `VM ${vm.vmId} has ${vm.imageBytes} bytes; its dirty set is of ${pageCount} pages`,
    });
  }
}

/** What `recordSet` would record. Changes nothing, and refuses what it would refuse. */
export function joinSet(db: Database, captureId: CaptureId, fetched: FetchedPages): PageSets {
  const job = requireJob(db, captureId);
  expectStep(job, 'recordSet', ['intended', 'recorded']);
  const vm = requireVm(db, job.vmId);
  checkSets(vm, fetched);
  const firstRound = job.step === 'intended';
  if (firstRound && job.widenReason !== null && fetched.widened !== true) {
    refuse({
      kind: 'set-not-widened',
      message: `capture ${captureId} must widen (${job.widenReason}); its set is not marked so`,
    });
  }
  return joinSets(fetched, readLedger(db, vm.vmId));
}

/** Step 3 (I2). Returns what this epoch's layer must hold. */
export function recordSet(
  db: Database,
  captureId: CaptureId,
  fetched: FetchedPages,
  nowMs: number,
): PageSets {
  const joined = joinSet(db, captureId, fetched);
  const vm = requireVm(db, requireJob(db, captureId).vmId);
  writeLedger(db, vm.vmId, joined, vm.epoch);
  if (fetched.widened === true) clearLost(db, vm.vmId);
  if (vm.imageBytes === null) setImageBytes(db, vm.vmId, pagesToBytes(joined.selected.pageCount));
  setStep(db, captureId, 'recorded', nowMs);
  return joined;
}

/** What recovery needs to go on with a sealed capture as its own run would have. */
export interface SealedFacts {
  /** What its publish does. */
  readonly publishJson?: string;
  /** What it answers. */
  readonly resultJson?: string;
}

/** Step 4 is done: the layer's file is final, and every check of the copy has passed. */
export function sealed(
  db: Database,
  captureId: CaptureId,
  layer: LayerRef,
  kept: SealedFacts,
  nowMs: number,
): void {
  const job = requireJob(db, captureId);
  expectStep(job, 'sealed', ['recorded']);
  if (layer.parentUuid !== job.parentUuid) {
    refuse({
      kind: 'layer-mismatch',
      message:
        `layer ${layer.uuid} sits on ${String(layer.parentUuid)}; ` +
        `capture ${captureId} began on ${String(job.parentUuid)}`,
    });
  }
  setLayer(db, captureId, layer, kept.publishJson ?? null);
  if (kept.resultJson !== undefined) setResult(db, captureId, kept.resultJson);
  setStep(db, captureId, 'sealed', nowMs);
}

/** A prepared entry that a commit makes: a fork's children are started from the new layer. */
export interface PreparedEntry {
  readonly preparedId: string;
  /** Taken by the capture's publish; the entry owns it from now on. */
  readonly hold: HoldId;
}

/** Step 5, the commit point (I3, I8, I11). */
export function commit(
  db: Database,
  captureId: CaptureId,
  entry: PreparedEntry | null,
  nowMs: number,
): CaptureJob {
  const job = requireJob(db, captureId);
  if (job.step === 'committed' || job.step === 'published') return job;
  expectStep(job, 'commit', ['sealed']);
  const { layer } = job;
  assert(layer !== null, 'a sealed capture has a layer');
  const vm = requireVm(db, job.vmId);
  assert(vm.memoryHead === job.parentUuid, 'I8: the memory parent is that of the intent');
  const { epoch } = vm;
  // A widened set selects all that may differ.
  const complete = layer.complete === true || job.widenReason !== null;
  const flags = { managed: true, published: false, epoch };
  addLayer(db, { ...layer, complete }, job.parentUuid, flags);
  dropLeases(db, 'capture', captureId);
  takeLease(db, 'capture', captureId, layer.uuid, nowMs);
  if (entry !== null) {
    takeLease(db, 'prepared', entry.preparedId, layer.uuid, nowMs);
    addOwner(db, entry.hold, { kind: 'prepared', id: entry.preparedId });
  }
  nextEpoch(db, vm.vmId, job.advance ? layer.uuid : vm.memoryHead);
  if (job.advance) clearLedger(db, vm.vmId);
  setStep(db, captureId, 'committed', nowMs);
  return requireJob(db, captureId);
}

/** Step 6 is done: the catalog has the snapshot, and with it the whole chain. */
export function published(
  db: Database,
  captureId: CaptureId,
  snapshot: SnapshotId,
  nowMs: number,
): CaptureJob {
  const job = requireJob(db, captureId);
  if (job.step === 'published') return job;
  expectStep(job, 'published', ['committed']);
  assert(job.layer !== null, 'a committed capture has a layer');
  if (findLayer(db, job.layer.uuid) !== undefined) markPublished(db, job.layer.uuid);
  dropLeases(db, 'capture', captureId);
  setSnapshot(db, captureId, snapshot);
  setStep(db, captureId, 'published', nowMs);
  return requireJob(db, captureId);
}

export interface AbortOptions {
  /** False: the source was certainly not read, so nothing can be lost. Unsaid: it may have been. */
  readonly fetchAttempted?: boolean;
}

/** Any failure before the commit point (I4, I6). */
export function abort(
  db: Database,
  captureId: CaptureId,
  failure: FailureDetail,
  o: AbortOptions,
  nowMs: number,
): CaptureJob {
  const job = requireJob(db, captureId);
  if (job.step === 'aborted') return job;
  expectStep(job, 'abort', ['created', 'intended', 'recorded', 'sealed']);
  if (job.step === 'intended' && job.clearsOnRead && o.fetchAttempted !== false) {
    setLost(db, job.vmId, `capture ${captureId} ended before its dirty set was recorded`);
  }
  dropLeases(db, 'capture', captureId);
  setFailure(db, captureId, failure);
  setStep(db, captureId, 'aborted', nowMs);
  return requireJob(db, captureId);
}
