/** Table `gc_run`: what each collection did. */
import type { ColumnType } from 'kysely';
import type { Tx } from './database.ts';

export interface GcRunTable {
  readonly id: ColumnType<string, string, never>;
  readonly collector: ColumnType<string, string, never>;
  readonly started_at_ms: ColumnType<number, number, never>;
  readonly finished_at_ms: number | null;
  /** Null while it runs, and for good if it was killed. */
  readonly outcome: GcOutcome | null;
  readonly message: string | null;
  readonly contents_deleted: number;
  readonly layers_condemned: number;
  readonly artifacts_reclaimed: number;
  readonly bytes_reclaimed: number;
}

/**
 * `stopped`: by the mass-delete guard or a signal. `failed`: by something unreadable or unwritable.
 */
export type GcOutcome = 'done' | 'stopped' | 'failed';

export interface GcRun {
  readonly id: string;
  readonly collector: string;
  readonly startedAtMs: number;
  readonly finishedAtMs: number | null;
  readonly outcome: GcOutcome | null;
  readonly message: string | null;
  readonly contentsDeleted: number;
  readonly layersCondemned: number;
  readonly artifactsReclaimed: number;
  readonly bytesReclaimed: number;
}

export async function insertRun(tx: Tx, run: { id: string; collector: string }): Promise<void> {
  await tx.db
    .insertInto('gc_run')
    .values({
      id: run.id,
      collector: run.collector,
      started_at_ms: tx.nowMs,
      finished_at_ms: null,
      outcome: null,
      message: null,
      contents_deleted: 0,
      layers_condemned: 0,
      artifacts_reclaimed: 0,
      bytes_reclaimed: 0,
    })
    .execute();
}

export async function finishRun(
  tx: Tx,
  run: Omit<GcRun, 'collector' | 'startedAtMs' | 'finishedAtMs'>,
): Promise<void> {
  await tx.db
    .updateTable('gc_run')
    .set({
      finished_at_ms: tx.nowMs,
      outcome: run.outcome,
      message: run.message,
      contents_deleted: run.contentsDeleted,
      layers_condemned: run.layersCondemned,
      artifacts_reclaimed: run.artifactsReclaimed,
      bytes_reclaimed: run.bytesReclaimed,
    })
    .where('id', '=', run.id)
    .execute();
}

/** Newest first. */
export async function selectRuns(tx: Tx, limit: number): Promise<GcRun[]> {
  const rows = await tx.db
    .selectFrom('gc_run')
    .selectAll()
    .orderBy('started_at_ms', 'desc')
    .orderBy('id', 'desc')
    .limit(limit)
    .execute();
  return rows.map((row) => ({
    id: row.id,
    collector: row.collector,
    startedAtMs: row.started_at_ms,
    finishedAtMs: row.finished_at_ms,
    outcome: row.outcome,
    message: row.message,
    contentsDeleted: row.contents_deleted,
    layersCondemned: row.layers_condemned,
    artifactsReclaimed: row.artifacts_reclaimed,
    bytesReclaimed: row.bytes_reclaimed,
  }));
}
