/**
 * Layers of which a verifying capture found that they lack pages: queued here first, so that an outage
 * of the catalog only delays their marks.
 */
import type { Database } from 'better-sqlite3';
import { layerUuid, type LayerUuid, type VmId } from '../units.ts';
import { listJobs } from './jobs.queries.ts';
import { chainOf } from './layers.queries.ts';
import { all, one, run } from './statements.ts';
import { requireVm, setLost } from './vms.queries.ts';

export interface PendingSuspect {
  readonly layer: LayerUuid;
  readonly reason: string;
}

/** Jobs that are looked at for layers beside the memory parent. */
const jobsMax = 10_000;

/**
 * Queues the layers of the memory parent above the launch parent, and those that the VM's captures
 * made, since the last one whose capture looked at every page; and makes the next capture widen,
 * since the dirty set cannot be trusted. Returns what it queued.
 */
export function pagesLost(db: Database, vmId: VmId, reason: string, nowMs: number): LayerUuid[] {
  const vm = requireVm(db, vmId);
  const layers = chainOf(db, vm.memoryHead)?.layers ?? [];
  const right = layers.findLastIndex(({ uuid, complete }) => uuid === vm.launchHead || complete);
  const suspects = new Set(layers.slice(right + 1).map(({ uuid }) => uuid));
  // Where captures do not advance, their layers are side by side.
  for (const { layer } of capturesSinceComplete(db, vmId, jobsMax)) suspects.add(layer);
  const sql = `INSERT OR IGNORE INTO suspect_queue (layer_uuid, reason, queued_at_ms, attempts)
    VALUES (?, ?, ?, 0)`;
  for (const uuid of suspects) run(db, sql, uuid, reason, nowMs);
  setLost(db, vmId, reason);
  return [...suspects];
}

/** Committed captures of a VM since the last one that looked at every page, newest first. */
export function capturesSinceComplete(
  db: Database,
  vmId: VmId,
  limit: number,
): { readonly layer: LayerUuid }[] {
  const since: { layer: LayerUuid }[] = [];
  for (const { step, layer, widenReason } of listJobs(db, { vmId, limit })) {
    if (layer === null || (step !== 'committed' && step !== 'published')) continue;
    if (layer.complete === true || widenReason !== null) break;
    since.push({ layer: layer.uuid });
  }
  return since;
}

/** Least tried first, then oldest. */
export function pendingSuspects(db: Database, limit: number): PendingSuspect[] {
  const sql = `SELECT layer_uuid, reason FROM suspect_queue
    ORDER BY attempts, queued_at_ms, layer_uuid LIMIT ?`;
  return all<{ layer_uuid: string; reason: string }>(db, sql, limit).map((row) => ({
    layer: layerUuid(row.layer_uuid),
    reason: row.reason,
  }));
}

export function suspectTried(db: Database, layer: LayerUuid): void {
  run(db, 'UPDATE suspect_queue SET attempts = attempts + 1 WHERE layer_uuid = ?', layer);
}

export function suspectDone(db: Database, layer: LayerUuid): void {
  run(db, 'DELETE FROM suspect_queue WHERE layer_uuid = ?', layer);
}

export function countSuspects(db: Database): number {
  return one<{ count: number }>(db, 'SELECT count(*) AS count FROM suspect_queue')?.count ?? 0;
}
