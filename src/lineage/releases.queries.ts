/** Catalog holds whose release is owed: queued here first, so that an outage only delays it. */
import type { Database } from 'better-sqlite3';
import type { HoldId } from '../units.ts';
import { all, one, run } from './statements.ts';

export interface PendingRelease {
  readonly holdId: HoldId;
  readonly queuedAtMs: number;
  readonly attempts: number;
}

export function queueRelease(db: Database, hold: HoldId, nowMs: number): void {
  const sql = `INSERT OR IGNORE INTO release_queue (hold_id, queued_at_ms, attempts)
    VALUES (?, ?, 0)`;
  run(db, sql, hold, nowMs);
}

/** Least tried first, then oldest. */
export function pendingReleases(db: Database, limit: number): PendingRelease[] {
  const sql = `SELECT hold_id AS holdId, queued_at_ms AS queuedAtMs, attempts FROM release_queue
    ORDER BY attempts, queued_at_ms, hold_id LIMIT ?`;
  return all<PendingRelease>(db, sql, limit);
}

export function countReleases(db: Database): number {
  return one<{ count: number }>(db, 'SELECT count(*) AS count FROM release_queue')?.count ?? 0;
}

export function releaseTried(db: Database, hold: HoldId): void {
  run(db, 'UPDATE release_queue SET attempts = attempts + 1 WHERE hold_id = ?', hold);
}

export function releaseDone(db: Database, hold: HoldId): void {
  run(db, 'DELETE FROM release_queue WHERE hold_id = ?', hold);
}
