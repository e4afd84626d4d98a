import type { Database } from 'better-sqlite3';
import type { VmId } from '../units.ts';
import { refuse } from './failures.ts';
import { decodeBitmap, encodeBitmap } from './page-sets.ts';
import type { PageSets } from './page-sets.ts';
import { one, run } from './statements.ts';

/** What was fetched and is in no committed layer yet; null where nothing is. */
export function readLedger(db: Database, vmId: VmId): PageSets | null {
  const sql = 'SELECT selected, zero FROM ledger WHERE vm_id = ?';
  const row = one<{ selected: Buffer; zero: Buffer | null }>(db, sql, vmId);
  if (row === undefined) return null;
  try {
    return {
      selected: decodeBitmap(row.selected),
      zero: row.zero === null ? null : decodeBitmap(row.zero),
    };
  } catch (error) {
    refuse({
      kind: 'node-db-corrupt',
      message: `the ledger of VM ${vmId} is damaged: ${String(error)}`,
    });
  }
}

export function hasLedger(db: Database, vmId: VmId): boolean {
  return one(db, 'SELECT 1 AS yes FROM ledger WHERE vm_id = ?', vmId) !== undefined;
}

/** Replaces the ledger by a set that already includes it. */
export function writeLedger(db: Database, vmId: VmId, sets: PageSets, sinceEpoch: number): void {
  const sql = `INSERT INTO ledger (vm_id, selected, zero, since_epoch) VALUES (?, ?, ?, ?)
    ON CONFLICT (vm_id) DO UPDATE SET selected = excluded.selected, zero = excluded.zero`;
  const zero = sets.zero === null ? null : encodeBitmap(sets.zero);
  run(db, sql, vmId, encodeBitmap(sets.selected), zero, sinceEpoch);
}

export function clearLedger(db: Database, vmId: VmId): void {
  run(db, 'DELETE FROM ledger WHERE vm_id = ?', vmId);
}
