/**
 * Replacing the newest run of a VM's memory parent by fewer layers of the same content. Invariants,
 * tested by name in test/lineage/compaction.test.ts:
 *
 * - K1 The run ends with the chain's head, so that every layer's header names the layer that really is
 *      below it: what is captured later sits on the new head, by its uuid. Nothing is ever put under a
 *      layer that exists. Source: ADR on compaction.
 * - K2 The swap is one transaction, and only where the head is the one that the new layers cover and
 *      no capture has an intent on it.
 * - K3 Layers that a capture, its publish or anyone with a lease still needs stay, though the VM's
 *      chain has left them. A snapshot published on the old chain keeps it.
 * - K4 A file that a compaction makes is named in node.db before it exists, so that one that was cut
 *      short leaves none.
 */
import type { Database } from 'better-sqlite3';
import { assert } from '../result.ts';
import { vmId as toVmId } from '../units.ts';
import type { LayerUuid, VmId } from '../units.ts';
import { refuse } from './failures.ts';
import { activeJob } from './jobs.queries.ts';
import { addLayer, chainOf, dropLeases, takeLease } from './layers.queries.ts';
import type { ChainRef, LayerRef } from './layers.queries.ts';
import { all, one, run } from './statements.ts';
import { requireVm, setMemoryHead } from './vms.queries.ts';

export interface PendingCompaction {
  readonly compactionId: string;
  readonly vmId: VmId;
  readonly scratchPaths: readonly string[];
}

export interface ChainSwap {
  /** Head of what the new layers stand for: the VM's memory parent must be exactly that. */
  readonly covers: LayerUuid;
  /** Bottom to top; the first sits on the layer below the run, each other on the one before. */
  readonly layers: readonly { readonly layer: LayerRef; readonly generation: number }[];
}

interface CompactionRow {
  readonly compaction_id: string;
  readonly vm_id: string;
  readonly scratch_json: string;
}

const toPending = (row: CompactionRow): PendingCompaction => ({
  compactionId: row.compaction_id,
  vmId: toVmId(row.vm_id),
  scratchPaths: JSON.parse(row.scratch_json) as string[],
});

export function pending(db: Database): PendingCompaction[] {
  return all<CompactionRow>(db, 'SELECT * FROM compaction ORDER BY started_at_ms').map(toPending);
}

function requirePending(db: Database, id: string): PendingCompaction {
  const row = one<CompactionRow>(db, 'SELECT * FROM compaction WHERE compaction_id = ?', id);
  if (row === undefined) {
    refuse({ kind: 'compaction-unknown', message: `no compaction ${id} is running` });
  }
  return toPending(row);
}

/** Leases the memory parent as it is, and returns it. */
export function begin(db: Database, vmId: VmId, id: string, nowMs: number): ChainRef {
  const chain = chainOf(db, requireVm(db, vmId).memoryHead);
  if (chain === null) {
    refuse({ kind: 'layer-unknown', message: `VM ${vmId} has no memory parent to compact` });
  }
  const sql = `INSERT OR IGNORE INTO compaction (compaction_id, vm_id, scratch_json, started_at_ms)
    VALUES (?, ?, '[]', ?)`;
  if (run(db, sql, id, vmId, nowMs) === 0) {
    refuse({ kind: 'compaction-running', message: `VM ${vmId} is being compacted` });
  }
  takeLease(db, 'compaction', id, chain.head, nowMs);
  return chain;
}

/** K4 */
export function addFile(db: Database, id: string, path: string): void {
  const paths = [...requirePending(db, id).scratchPaths, path];
  const sql = 'UPDATE compaction SET scratch_json = ? WHERE compaction_id = ?';
  run(db, sql, JSON.stringify(paths), id);
}

/** K1, K2. Returns the new chain. */
export function swap(db: Database, id: string, change: ChainSwap): ChainRef {
  const { vmId } = requirePending(db, id);
  const vm = requireVm(db, vmId);
  if (vm.memoryHead !== change.covers) {
    refuse({
      kind: 'chain-moved',
      message: `the memory parent of VM ${vmId} is ${String(vm.memoryHead)}, not ${change.covers}`,
    });
  }
  const job = activeJob(db, vmId);
  if (job !== undefined && job.step !== 'created') {
    refuse({
      kind: 'capture-running',
      message: `capture ${job.captureId} has an intent on VM ${vmId}`,
      runningCaptureId: job.captureId,
    });
  }
  for (const { layer, generation } of change.layers) {
    addLayer(db, layer, layer.parentUuid, { managed: true, published: false, generation });
  }
  const head = change.layers.at(-1)?.layer.uuid;
  assert(head !== undefined, 'a swap has a layer');
  setMemoryHead(db, vmId, head);
  abandon(db, id);
  const chain = chainOf(db, head);
  assert(chain !== null, 'the new head is known');
  return chain;
}

export function abandon(db: Database, id: string): void {
  dropLeases(db, 'compaction', id);
  run(db, 'DELETE FROM compaction WHERE compaction_id = ?', id);
}
