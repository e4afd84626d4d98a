import type { Database } from 'better-sqlite3';
import type { FailureDetail } from '../result.ts';
import { bytes, captureId as toCaptureId, digest, layerUuid } from '../units.ts';
import { snapshotId, vmId as toVmId } from '../units.ts';
import type { CaptureId, LayerUuid, SnapshotId, VmId } from '../units.ts';
import { refuse } from './failures.ts';
import type { LayerRef } from './layers.queries.ts';
import { all, one, run } from './statements.ts';

/** How far a capture got, durably. Source: DESIGN §5; the transitions are in epochs.ts. */
export type CaptureStep =
  'created' | 'intended' | 'recorded' | 'sealed' | 'committed' | 'published' | 'aborted';

/** Steps in which a capture is the one that runs on its VM. */
export const activeSteps: readonly CaptureStep[] = ['created', 'intended', 'recorded', 'sealed'];
export const finalSteps: readonly CaptureStep[] = ['published', 'aborted'];

export interface CaptureJob {
  readonly captureId: CaptureId;
  readonly vmId: VmId;
  /** What asked for it: `capture`, `fork`. */
  readonly kind: string;
  readonly idempotencyKey: string | null;
  readonly requestJson: string;
  readonly step: CaptureStep;
  /** Null before the intent. */
  readonly epoch: number | null;
  /** Head of the memory parent when the intent was recorded. */
  readonly parentUuid: LayerUuid | null;
  readonly clearsOnRead: boolean;
  readonly bytesIn: 'process' | 'file' | null;
  readonly advance: boolean;
  readonly widenReason: string | null;
  /** Files to remove when it aborts. */
  readonly scratchPaths: readonly string[];
  /** From `sealed` on. */
  readonly layer: LayerRef | null;
  /** What a publish needs, from `sealed` on; the capture room's own document. */
  readonly publishJson: string | null;
  readonly snapshotId: SnapshotId | null;
  readonly failure: FailureDetail | null;
  readonly resultJson: string | null;
  readonly createdAtMs: number;
  readonly updatedAtMs: number;
  readonly finishedAtMs: number | null;
}

interface JobRow {
  readonly capture_id: string;
  readonly vm_id: string;
  readonly kind: string;
  readonly idempotency_key: string | null;
  readonly request_json: string;
  readonly step: CaptureStep;
  readonly epoch: number | null;
  readonly parent_uuid: string | null;
  readonly clears_on_read: number | null;
  readonly bytes_in: 'process' | 'file' | null;
  readonly advance: number | null;
  readonly widen_reason: string | null;
  readonly scratch_json: string;
  readonly layer_json: string | null;
  readonly publish_json: string | null;
  readonly snapshot_id: string | null;
  readonly failure_json: string | null;
  readonly result_json: string | null;
  readonly created_at_ms: number;
  readonly updated_at_ms: number;
  readonly finished_at_ms: number | null;
}

function toJob(row: JobRow): CaptureJob {
  return {
    captureId: toCaptureId(row.capture_id),
    vmId: toVmId(row.vm_id),
    kind: row.kind,
    idempotencyKey: row.idempotency_key,
    requestJson: row.request_json,
    step: row.step,
    epoch: row.epoch,
    parentUuid: row.parent_uuid === null ? null : layerUuid(row.parent_uuid),
    clearsOnRead: row.clears_on_read === 1,
    bytesIn: row.bytes_in,
    advance: row.advance === 1,
    widenReason: row.widen_reason,
    scratchPaths: JSON.parse(row.scratch_json) as string[],
    layer: row.layer_json === null ? null : parseLayer(row.layer_json),
    publishJson: row.publish_json,
    snapshotId: row.snapshot_id === null ? null : snapshotId(row.snapshot_id),
    failure: row.failure_json === null ? null : (JSON.parse(row.failure_json) as FailureDetail),
    resultJson: row.result_json,
    createdAtMs: row.created_at_ms,
    updatedAtMs: row.updated_at_ms,
    finishedAtMs: row.finished_at_ms,
  };
}

/** Keeps what node.db uses of a sealed layer. */
export function layerJson(layer: LayerRef): string {
  const { uuid, parentUuid, path, digest: sum, sizeBytes, virtualBytes, dataBytes } = layer;
  const { complete = false } = layer;
  return JSON.stringify({
    uuid,
    parentUuid,
    path,
    digest: sum,
    sizeBytes,
    virtualBytes,
    dataBytes: dataBytes ?? 0,
    complete,
  });
}

function parseLayer(json: string): LayerRef {
  const raw = JSON.parse(json) as {
    uuid: string;
    parentUuid: string | null;
    path: string;
    digest: string;
    sizeBytes: number;
    virtualBytes: number;
    dataBytes: number;
    complete?: boolean;
  };
  return {
    uuid: layerUuid(raw.uuid),
    parentUuid: raw.parentUuid === null ? null : layerUuid(raw.parentUuid),
    path: raw.path,
    digest: digest(raw.digest),
    sizeBytes: bytes(raw.sizeBytes),
    virtualBytes: bytes(raw.virtualBytes),
    dataBytes: bytes(raw.dataBytes),
    complete: raw.complete ?? false,
  };
}

export function findJob(db: Database, captureId: CaptureId): CaptureJob | undefined {
  const row = one<JobRow>(db, 'SELECT * FROM capture_job WHERE capture_id = ?', captureId);
  return row === undefined ? undefined : toJob(row);
}

export function requireJob(db: Database, captureId: CaptureId): CaptureJob {
  const job = findJob(db, captureId);
  if (job === undefined) {
    refuse({ kind: 'capture-unknown', message: `no capture ${captureId}`, captureId });
  }
  return job;
}

export function findJobByKey(db: Database, key: string): CaptureJob | undefined {
  const row = one<JobRow>(db, 'SELECT * FROM capture_job WHERE idempotency_key = ?', key);
  return row === undefined ? undefined : toJob(row);
}

/** The capture that runs on the VM now, if one does. */
export function activeJob(db: Database, vmId: VmId): CaptureJob | undefined {
  const sql = `SELECT * FROM capture_job
    WHERE vm_id = ? AND step IN ('created', 'intended', 'recorded', 'sealed')`;
  const row = one<JobRow>(db, sql, vmId);
  return row === undefined ? undefined : toJob(row);
}

/** Oldest first. */
export function unfinishedJobs(db: Database): CaptureJob[] {
  const sql = `SELECT * FROM capture_job WHERE step NOT IN ('published', 'aborted')
    ORDER BY created_at_ms, capture_id`;
  return all<JobRow>(db, sql).map(toJob);
}

/** Committed, and not published. */
export function countCommitted(db: Database): number {
  const sql = "SELECT count(*) AS count FROM capture_job WHERE step = 'committed'";
  return one<{ count: number }>(db, sql)?.count ?? 0;
}

export interface JobQuery {
  readonly vmId?: VmId;
  readonly limit: number;
  /** The last job of the page before. */
  readonly after?: { readonly createdAtMs: number; readonly captureId: CaptureId };
}

/** Newest first. */
export function listJobs(db: Database, query: JobQuery): CaptureJob[] {
  const { vmId = null, after, limit } = query;
  const afterMs = after?.createdAtMs ?? null;
  const sql = `SELECT * FROM capture_job WHERE (? IS NULL OR vm_id = ?)
    AND (? IS NULL OR (created_at_ms, capture_id) < (?, ?))
    ORDER BY created_at_ms DESC, capture_id DESC LIMIT ?`;
  const values = [vmId, vmId, afterMs, afterMs, after?.captureId ?? null, limit];
  return all<JobRow>(db, sql, ...values).map(toJob);
}

export interface NewJob {
  readonly captureId: CaptureId;
  readonly vmId: VmId;
  readonly kind?: string;
  readonly idempotencyKey?: string | null;
  /** Canonical text: two requests are the same when this is. */
  readonly requestJson: string;
  readonly createdAtMs: number;
}

export function insertJob(db: Database, job: NewJob): void {
  run(
    db,
    `INSERT INTO capture_job (capture_id, vm_id, kind, idempotency_key, request_json, step,
      scratch_json, created_at_ms, updated_at_ms) VALUES (?, ?, ?, ?, ?, 'created', '[]', ?, ?)`,
    job.captureId,
    job.vmId,
    job.kind ?? 'capture',
    job.idempotencyKey ?? null,
    job.requestJson,
    job.createdAtMs,
    job.createdAtMs,
  );
}

export interface Intent {
  readonly epoch: number;
  readonly parentUuid: LayerUuid | null;
  readonly clearsOnRead: boolean;
  readonly bytesIn: 'process' | 'file';
  readonly advance: boolean;
  readonly widenReason: string | null;
  readonly scratchPaths: readonly string[];
}

export function setIntent(db: Database, captureId: CaptureId, intent: Intent): void {
  run(
    db,
    `UPDATE capture_job SET epoch = ?, parent_uuid = ?, clears_on_read = ?, bytes_in = ?,
      advance = ?, widen_reason = ?, scratch_json = ? WHERE capture_id = ?`,
    intent.epoch,
    intent.parentUuid,
    intent.clearsOnRead ? 1 : 0,
    intent.bytesIn,
    intent.advance ? 1 : 0,
    intent.widenReason,
    JSON.stringify(intent.scratchPaths),
    captureId,
  );
}

export function setStep(
  db: Database,
  captureId: CaptureId,
  step: CaptureStep,
  nowMs: number,
): void {
  const sql = `UPDATE capture_job SET step = ?, updated_at_ms = ?, finished_at_ms = ?
    WHERE capture_id = ?`;
  run(db, sql, step, nowMs, finalSteps.includes(step) ? nowMs : null, captureId);
}

export function setLayer(
  db: Database,
  captureId: CaptureId,
  layer: LayerRef,
  publishJson: string | null,
): void {
  const sql = 'UPDATE capture_job SET layer_json = ?, publish_json = ? WHERE capture_id = ?';
  run(db, sql, layerJson(layer), publishJson, captureId);
}

export function setFailure(db: Database, captureId: CaptureId, failure: FailureDetail): void {
  const { kind, message } = failure;
  const sql = 'UPDATE capture_job SET failure_json = ? WHERE capture_id = ?';
  run(db, sql, JSON.stringify({ kind, message }), captureId);
}

export function setSnapshot(db: Database, captureId: CaptureId, snapshot: SnapshotId): void {
  run(db, 'UPDATE capture_job SET snapshot_id = ? WHERE capture_id = ?', snapshot, captureId);
}

/**
 * Forgets jobs that were published or aborted before `beforeMs`, oldest first; not one that a paused
 * VM names. Their idempotency keys are free again. Returns how many there were.
 */
export function trimJobs(db: Database, beforeMs: number, limit: number): number {
  const sql = `DELETE FROM capture_job WHERE capture_id IN (
    SELECT capture_id FROM capture_job
    WHERE step IN ('published', 'aborted') AND finished_at_ms < ?
      AND capture_id NOT IN (SELECT paused_by FROM vm WHERE paused_by IS NOT NULL)
    ORDER BY created_at_ms, capture_id LIMIT ?)`;
  return run(db, sql, beforeMs, limit);
}

export function setResult(db: Database, captureId: CaptureId, resultJson: string): void {
  run(db, 'UPDATE capture_job SET result_json = ? WHERE capture_id = ?', resultJson, captureId);
}
