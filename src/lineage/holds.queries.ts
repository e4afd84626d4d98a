/**
 * Who on this node needs a catalog hold. An owner is a VM, a prepared entry, or a restore (a chain
 * that is being made local for a VM); several may own one hold. Invariants, tested by name in
 * test/lineage/holds.test.ts:
 *
 * - H1 An owner is on the disk before the catalog is asked for the hold: by a `hold` call, or by the
 *      publish of a fork's capture.
 * - H2 Whatever ends a hold's last owner queues its release, in the same transaction.
 * - H3 A VM owns its hold while it is attached: running, paused by us or by its owner, being
 *      captured, or gone and still on record. What a committed capture of it is still to publish
 *      needs none: its lease keeps the layers, and a publish brings what the catalog has forgotten.
 * - H4 What an earlier life of the daemon had under way ends when the next one begins: restores, and
 *      prepared entries that no VM uses.
 */
import type { Database } from 'better-sqlite3';
import { holdId } from '../units.ts';
import type { HoldId } from '../units.ts';
import { dropLeases } from './layers.queries.ts';
import { queueRelease } from './releases.queries.ts';
import { all, one, run } from './statements.ts';

export type HoldOwnerKind = 'vm' | 'prepared' | 'restore';

/** What is needed only while something is under way or in use; its leases bear the same name. */
export type Need = Exclude<HoldOwnerKind, 'vm'>;

export interface HoldOwner {
  readonly kind: HoldOwnerKind;
  readonly id: string;
}

export function addOwner(db: Database, hold: HoldId, owner: HoldOwner): void {
  const sql = `INSERT OR IGNORE INTO hold_owner (hold_id, owner_kind, owner_id) VALUES (?, ?, ?)`;
  run(db, sql, hold, owner.kind, owner.id);
}

export function isOwned(db: Database, hold: HoldId): boolean {
  return one(db, 'SELECT 1 AS yes FROM hold_owner WHERE hold_id = ? LIMIT 1', hold) !== undefined;
}

/** H2 */
export function endOwner(db: Database, { kind, id }: HoldOwner, nowMs: number): void {
  const sql = 'SELECT hold_id AS hold FROM hold_owner WHERE owner_kind = ? AND owner_id = ?';
  const holds = all<{ hold: string }>(db, sql, kind, id).map(({ hold }) => holdId(hold));
  run(db, 'DELETE FROM hold_owner WHERE owner_kind = ? AND owner_id = ?', kind, id);
  for (const hold of holds) if (!isOwned(db, hold)) queueRelease(db, hold, nowMs);
}

/** Its leases and its share of holds. */
export function endNeed(db: Database, need: Need, id: string, nowMs: number): void {
  dropLeases(db, need, id);
  endOwner(db, { kind: need, id }, nowMs);
}

/** H4 */
export function endEarlierNeeds(db: Database, nowMs: number): void {
  const sql = `SELECT owner_kind AS need, owner_id AS id FROM hold_owner
      WHERE owner_kind IN ('prepared', 'restore')
    UNION SELECT holder_kind, holder_id FROM lease WHERE holder_kind IN ('prepared', 'restore')`;
  for (const { need, id } of all<{ need: Need; id: string }>(db, sql)) {
    if (need === 'prepared' && isPreparedUsed(db, id)) continue;
    endNeed(db, need, id, nowMs);
  }
}

/** Whether an attached VM was started from this prepared entry. */
export function isPreparedUsed(db: Database, preparedId: string): boolean {
  const sql = 'SELECT 1 AS yes FROM vm WHERE prepared_id = ? AND detached_at_ms IS NULL LIMIT 1';
  return one(db, sql, preparedId) !== undefined;
}

export interface OwnedHold extends HoldOwner {
  readonly hold: HoldId;
}

export function listOwners(db: Database): OwnedHold[] {
  const sql = `SELECT hold_id AS hold, owner_kind AS kind, owner_id AS id FROM hold_owner
    ORDER BY hold_id, owner_kind, owner_id`;
  return all<OwnedHold>(db, sql);
}
