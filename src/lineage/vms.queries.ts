import type { Database } from 'better-sqlite3';
import { bytes, captureId, layerUuid, vmId as toVmId } from '../units.ts';
import type { Bytes, CaptureId, HoldId, LayerUuid, VmId } from '../units.ts';
import { refuse } from './failures.ts';
import { addOwner, endOwner } from './holds.queries.ts';
import { addChain, addLayer, findLayer } from './layers.queries.ts';
import type { LayerRef } from './layers.queries.ts';
import { all, one, run } from './statements.ts';

export interface AttachVm {
  readonly vmId: VmId;
  readonly socketPath: string;
  readonly pid: number;
  /** Field 22 of /proc/<pid>/stat: with the pid, one process for good. */
  readonly startTimeTicks: bigint;
  /** Of the kernel, as its own `boot_id` says; null: unknown. */
  readonly bootId?: string | null;
  readonly dialect: string;
  readonly trackingMode: string;
  /** Null until the VM has booted and its layout is known. */
  readonly imageBytes: Bytes | null;
  /** What the process was started from, bottom to top; empty for a fresh VM. */
  readonly launchParent: readonly LayerRef[];
  /** Files of it that this node did not have before were made for us: they go with the last need. */
  readonly launchFilesOurs?: boolean;
  /**
   * True only where every write since launch is still in the tracking: attached before boot, or
   * launched by us. Otherwise the first capture from a source that clears on read widens.
   */
  readonly trackedSinceLaunch: boolean;
  /** The catalog hold on its launch parent: owned by the VM from now until it is detached. */
  readonly hold?: HoldId | null;
  /** The prepared entry whose memory file it was started from. */
  readonly preparedId?: string | null;
  /** Whatever else the caller wants back with the record (capabilities, VMM version, …). */
  readonly factsJson?: string;
  readonly nowMs: number;
}

export interface VmRecord {
  readonly vmId: VmId;
  readonly socketPath: string;
  readonly pid: number;
  readonly startTimeTicks: bigint;
  /** Null where a program of before attached it. */
  readonly bootId: string | null;
  readonly dialect: string;
  readonly trackingMode: string;
  readonly imageBytes: Bytes | null;
  readonly launchHead: LayerUuid | null;
  readonly memoryHead: LayerUuid | null;
  readonly epoch: number;
  /** Set while the VM's tracking may have lost pages: the next capture widens. */
  readonly lostReason: string | null;
  /** The loss matters only to sources that clear on read; the others name all since launch. */
  readonly lostIfClearing: boolean;
  /** The capture that paused it and has not resumed it. */
  readonly pausedBy: CaptureId | null;
  readonly preparedId: string | null;
  readonly factsJson: string;
  readonly attachedAtMs: number;
}

interface VmRow {
  readonly vm_id: string;
  readonly socket_path: string;
  readonly pid: number;
  readonly start_time_ticks: string;
  readonly boot_id: string | null;
  readonly dialect: string;
  readonly tracking_mode: string;
  readonly image_bytes: number | null;
  readonly launch_head: string | null;
  readonly memory_head: string | null;
  readonly epoch: number;
  readonly lost_reason: string | null;
  readonly lost_if_clearing: number;
  readonly paused_by: string | null;
  readonly prepared_id: string | null;
  readonly facts_json: string;
  readonly attached_at_ms: number;
}

const toVm = (row: VmRow): VmRecord => ({
  vmId: toVmId(row.vm_id),
  socketPath: row.socket_path,
  pid: row.pid,
  startTimeTicks: BigInt(row.start_time_ticks),
  bootId: row.boot_id,
  dialect: row.dialect,
  trackingMode: row.tracking_mode,
  imageBytes: row.image_bytes === null ? null : bytes(row.image_bytes),
  launchHead: row.launch_head === null ? null : layerUuid(row.launch_head),
  memoryHead: row.memory_head === null ? null : layerUuid(row.memory_head),
  epoch: row.epoch,
  lostReason: row.lost_reason,
  lostIfClearing: row.lost_if_clearing === 1,
  pausedBy: row.paused_by === null ? null : captureId(row.paused_by),
  preparedId: row.prepared_id,
  factsJson: row.facts_json,
  attachedAtMs: row.attached_at_ms,
});

export function findVm(db: Database, vmId: VmId): VmRecord | undefined {
  const row = one<VmRow>(db, 'SELECT * FROM vm WHERE vm_id = ? AND detached_at_ms IS NULL', vmId);
  return row === undefined ? undefined : toVm(row);
}

export function requireVm(db: Database, vmId: VmId): VmRecord {
  const vm = findVm(db, vmId);
  if (vm === undefined) {
    refuse({ kind: 'vm-unknown', message: `no VM ${vmId} is attached`, vmId });
  }
  return vm;
}

export function listVms(db: Database): VmRecord[] {
  const sql = 'SELECT * FROM vm WHERE detached_at_ms IS NULL ORDER BY attached_at_ms, vm_id';
  return all<VmRow>(db, sql).map(toVm);
}

/** Did we clear this very process's tracking before, under whatever name it was attached? */
function wasCleared(db: Database, v: AttachVm): boolean {
  const sql = `SELECT 1 AS yes FROM vm
    WHERE pid = ? AND start_time_ticks = ? AND read_cleared = 1`;
  return one(db, sql, v.pid, v.startTimeTicks.toString()) !== undefined;
}

/**
 * A VM is a process, whatever names it and its socket have: whatever clears its dirty set has one
 * owner. A process of an earlier boot is gone, whoever has its number now.
 */
function refuseSecondOwner(db: Database, v: AttachVm): void {
  const sql = `SELECT vm_id FROM vm
    WHERE detached_at_ms IS NULL AND pid = ? AND start_time_ticks = ?
    AND (boot_id IS NULL OR boot_id IS ?) ORDER BY attached_at_ms, vm_id`;
  const owner = one<{ vm_id: string }>(
    db,
    sql,
    v.pid,
    v.startTimeTicks.toString(),
    v.bootId ?? null,
  );
  if (owner === undefined) return;
  refuse({
    kind: 'vm-attached',
    message: `process ${v.pid} is attached already, as VM ${owner.vm_id}`,
    vmId: toVmId(owner.vm_id),
  });
}

/**
 * What programs of before allowed: one process under several names, whose captures cleared each
 * other's dirty sets. The first keeps it; none of its sets is trusted. Returns the names let go of.
 */
export function detachDoubles(db: Database, nowMs: number): VmId[] {
  const sql = `SELECT * FROM vm v WHERE detached_at_ms IS NULL AND EXISTS (
      SELECT 1 FROM vm w WHERE w.detached_at_ms IS NULL AND w.vm_id <> v.vm_id
        AND w.pid = v.pid AND w.start_time_ticks = v.start_time_ticks AND w.boot_id IS v.boot_id)
    ORDER BY attached_at_ms, vm_id`;
  const kept = new Set<string>();
  const gone: VmId[] = [];
  for (const vm of all<VmRow>(db, sql).map(toVm)) {
    const process = `${vm.pid} ${vm.startTimeTicks}`;
    setLost(db, vm.vmId, `process ${vm.pid} was attached under several names`);
    const busy = vm.pausedBy !== null || hasUnfinished(db, vm.vmId);
    if (kept.has(process) && !busy) {
      detach(db, vm.vmId, nowMs);
      gone.push(vm.vmId);
    }
    kept.add(process);
  }
  return gone;
}

const hasUnfinished = (db: Database, vmId: VmId): boolean =>
  one(
    db,
    `SELECT 1 AS yes FROM capture_job WHERE vm_id = ? AND step NOT IN ('published', 'aborted')`,
    vmId,
  ) !== undefined;

/**
 * Attaching the same process under the same id again returns the record as it is: it keeps the hold
 * that it owns.
 */
export function attach(db: Database, v: AttachVm): VmRecord {
  const known = findVm(db, v.vmId);
  if (known !== undefined) {
    if (known.pid === v.pid && known.startTimeTicks === v.startTimeTicks) return known;
    refuse({
      kind: 'vm-exists',
      message: `VM ${v.vmId} is attached as process ${known.pid}; detach it first`,
      vmId: v.vmId,
    });
  }
  refuseSecondOwner(db, v);
  const cleared = wasCleared(db, v);
  let lostReason: string | null = null;
  if (cleared) lostReason = `the tracking of process ${v.pid} was read before it was attached`;
  else if (!v.trackedSinceLaunch) lostReason = 'attached while running';
  const head = launchHead(db, v);
  run(db, 'DELETE FROM vm WHERE vm_id = ? AND detached_at_ms IS NOT NULL', v.vmId);
  run(
    db,
    `INSERT INTO vm (vm_id, socket_path, pid, start_time_ticks, dialect, tracking_mode, image_bytes,
      launch_head, memory_head, epoch, lost_reason, lost_if_clearing, read_cleared,
      prepared_id, facts_json, attached_at_ms, boot_id)
     VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 1, ?, ?, ?, ?, ?, ?, ?)`,
    v.vmId,
    v.socketPath,
    v.pid,
    v.startTimeTicks.toString(),
    v.dialect,
    v.trackingMode,
    v.imageBytes,
    head,
    head,
    lostReason,
    cleared ? 0 : 1,
    cleared ? 1 : 0,
    v.preparedId ?? null,
    v.factsJson ?? '{}',
    v.nowMs,
    v.bootId ?? null,
  );
  if (v.hold != null) addOwner(db, v.hold, { kind: 'vm', id: v.vmId });
  return requireVm(db, v.vmId);
}

/** Layers that this node already has keep what is known of them. */
function launchHead(db: Database, v: AttachVm): LayerUuid | null {
  const chain = v.launchParent;
  const flags = { managed: v.launchFilesOurs === true, published: true };
  const known = chain.findLastIndex((layer) => findLayer(db, layer.uuid) !== undefined);
  if (known < 0) return addChain(db, chain, flags);
  let below: LayerUuid | null = null;
  for (const [i, layer] of chain.entries()) {
    const there = findLayer(db, layer.uuid);
    addLayer(db, layer, there === undefined || i > known ? below : there.parentUuid, flags);
    below = layer.uuid;
  }
  return below;
}

/** Its heads, ledger and share of its hold go; the row stays, so that the process is known again. */
export function detach(db: Database, vmId: VmId, nowMs: number): void {
  run(db, 'DELETE FROM ledger WHERE vm_id = ?', vmId);
  endOwner(db, { kind: 'vm', id: vmId }, nowMs);
  run(
    db,
    `UPDATE vm SET detached_at_ms = ?, launch_head = NULL, memory_head = NULL, paused_by = NULL,
       prepared_id = NULL
     WHERE vm_id = ?`,
    nowMs,
    vmId,
  );
}

/** Sets one member of the VM's facts. A VM that was detached meanwhile is left alone. */
export function setFact(db: Database, vmId: VmId, name: string, json: string): void {
  const sql = `UPDATE vm SET facts_json = json_set(facts_json, ?, json(?))
    WHERE vm_id = ? AND detached_at_ms IS NULL`;
  run(db, sql, `$.${name}`, json, vmId);
}

export function setPaused(
  db: Database,
  vmId: VmId,
  pausedBy: CaptureId | null,
  nowMs: number | null,
): void {
  const sql = 'UPDATE vm SET paused_by = ?, paused_at_ms = ? WHERE vm_id = ?';
  run(db, sql, pausedBy, nowMs, vmId);
}

/** From now on the next capture widens, whatever its source. */
export function setLost(db: Database, vmId: VmId, reason: string): void {
  run(db, 'UPDATE vm SET lost_reason = ?, lost_if_clearing = 0 WHERE vm_id = ?', reason, vmId);
}

/** The ledger holds everything: nothing is lost any more. */
export function clearLost(db: Database, vmId: VmId): void {
  run(db, 'UPDATE vm SET lost_reason = NULL WHERE vm_id = ?', vmId);
}

/** A source that clears on read is about to be read. */
export function setReadCleared(db: Database, vmId: VmId): void {
  run(db, 'UPDATE vm SET read_cleared = 1 WHERE vm_id = ?', vmId);
}

export function setImageBytes(db: Database, vmId: VmId, size: Bytes): void {
  run(db, 'UPDATE vm SET image_bytes = ? WHERE vm_id = ?', size, vmId);
}

/** The epoch ends: `head` is what the next capture's layer sits on. */
export function nextEpoch(db: Database, vmId: VmId, head: LayerUuid | null): void {
  run(db, 'UPDATE vm SET memory_head = ?, epoch = epoch + 1 WHERE vm_id = ?', head, vmId);
}

/** Compaction: another head with the same content. */
export function setMemoryHead(db: Database, vmId: VmId, head: LayerUuid): void {
  run(db, 'UPDATE vm SET memory_head = ? WHERE vm_id = ?', head, vmId);
}
