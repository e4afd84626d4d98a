/**
 * Tables of node.db and their versions: forward only, a step is frozen once merged, all missing steps
 * run in one transaction. `user_version` is the number of steps done.
 */
import type { Database } from 'better-sqlite3';
import { refuse } from './failures.ts';

const step1 = `
-- Layer files on this node. below_uuid is the layer it sits on, so that a layer can never be
-- forgotten before those above it; managed = 1: the file is ours to delete.
CREATE TABLE local_layer (
  uuid TEXT PRIMARY KEY NOT NULL,
  below_uuid TEXT REFERENCES local_layer(uuid) ON DELETE RESTRICT,
  depth INTEGER NOT NULL,
  path TEXT NOT NULL UNIQUE,
  digest TEXT NOT NULL,
  size_bytes INTEGER NOT NULL,
  data_bytes INTEGER NOT NULL,
  virtual_bytes INTEGER NOT NULL,
  managed INTEGER NOT NULL,
  published INTEGER NOT NULL,
  condemned_at_ms INTEGER
) STRICT;
CREATE INDEX local_layer_below ON local_layer(below_uuid);

CREATE TABLE vm (
  vm_id TEXT PRIMARY KEY NOT NULL,
  socket_path TEXT NOT NULL,
  pid INTEGER NOT NULL,
  start_time_ticks TEXT NOT NULL,
  dialect TEXT NOT NULL,
  tracking_mode TEXT NOT NULL,
  image_bytes INTEGER,
  launch_head TEXT REFERENCES local_layer(uuid) ON DELETE RESTRICT,
  memory_head TEXT REFERENCES local_layer(uuid) ON DELETE RESTRICT,
  epoch INTEGER NOT NULL,
  lost_reason TEXT,
  lost_if_clearing INTEGER NOT NULL,
  read_cleared INTEGER NOT NULL,
  paused_by TEXT,
  paused_at_ms INTEGER,
  facts_json TEXT NOT NULL,
  attached_at_ms INTEGER NOT NULL,
  detached_at_ms INTEGER
) STRICT;
CREATE INDEX vm_launch_head ON vm(launch_head);
CREATE INDEX vm_memory_head ON vm(memory_head);
CREATE INDEX vm_identity ON vm(pid, start_time_ticks);

-- Pages that were fetched and are in no committed layer of the VM's memory parent.
CREATE TABLE ledger (
  vm_id TEXT PRIMARY KEY NOT NULL REFERENCES vm(vm_id) ON DELETE RESTRICT,
  selected BLOB NOT NULL,
  zero BLOB,
  since_epoch INTEGER NOT NULL
) STRICT;

CREATE TABLE capture_job (
  capture_id TEXT PRIMARY KEY NOT NULL,
  vm_id TEXT NOT NULL,
  kind TEXT NOT NULL,
  idempotency_key TEXT UNIQUE,
  request_json TEXT NOT NULL,
  step TEXT NOT NULL,
  epoch INTEGER,
  parent_uuid TEXT,
  clears_on_read INTEGER,
  bytes_in TEXT,
  advance INTEGER,
  widen_reason TEXT,
  scratch_json TEXT NOT NULL,
  layer_json TEXT,
  publish_json TEXT,
  snapshot_id TEXT,
  failure_json TEXT,
  result_json TEXT,
  created_at_ms INTEGER NOT NULL,
  updated_at_ms INTEGER NOT NULL,
  finished_at_ms INTEGER
) STRICT;
-- Two active captures of one VM cannot exist.
CREATE UNIQUE INDEX capture_job_active ON capture_job(vm_id)
  WHERE step IN ('created', 'intended', 'recorded', 'sealed');
CREATE INDEX capture_job_unfinished ON capture_job(step)
  WHERE step NOT IN ('published', 'aborted');
CREATE INDEX capture_job_by_time ON capture_job(created_at_ms, capture_id);

-- Whoever reads a chain says so: everything at or below layer_uuid stays.
CREATE TABLE lease (
  holder_kind TEXT NOT NULL,
  holder_id TEXT NOT NULL,
  layer_uuid TEXT NOT NULL REFERENCES local_layer(uuid) ON DELETE RESTRICT,
  created_at_ms INTEGER NOT NULL,
  PRIMARY KEY (holder_kind, holder_id, layer_uuid)
) STRICT, WITHOUT ROWID;
CREATE INDEX lease_layer ON lease(layer_uuid);

-- Catalog holds to release, kept until the catalog has done it.
CREATE TABLE release_queue (
  hold_id TEXT PRIMARY KEY NOT NULL,
  queued_at_ms INTEGER NOT NULL,
  attempts INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
`;

const step2 = `
-- How often the layer's oldest bytes were rewritten: 0 as captured.
ALTER TABLE local_layer ADD COLUMN generation INTEGER NOT NULL DEFAULT 0;

-- At most one compaction of a VM's memory parent; the files that it may leave.
CREATE TABLE compaction (
  compaction_id TEXT PRIMARY KEY NOT NULL,
  vm_id TEXT NOT NULL UNIQUE,
  scratch_json TEXT NOT NULL,
  started_at_ms INTEGER NOT NULL
) STRICT;
`;

const step3 = `
-- Who needs a catalog hold; its release is queued with the last of them.
CREATE TABLE hold_owner (
  hold_id TEXT NOT NULL,
  owner_kind TEXT NOT NULL,
  owner_id TEXT NOT NULL,
  PRIMARY KEY (hold_id, owner_kind, owner_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX hold_owner_by_owner ON hold_owner(owner_kind, owner_id);

-- The prepared entry whose memory file the VM was started from.
ALTER TABLE vm ADD COLUMN prepared_id TEXT;
CREATE INDEX vm_prepared ON vm(prepared_id) WHERE prepared_id IS NOT NULL;

-- Both were kept in facts_json: the hold itself, and the entry's folder, named by a UUID. Holds of
-- VMs that were detached may not have been queued: releasing twice is harmless.
INSERT INTO hold_owner (hold_id, owner_kind, owner_id)
  SELECT json_extract(facts_json, '$.hold'), 'vm', vm_id FROM vm
  WHERE detached_at_ms IS NULL AND json_extract(facts_json, '$.hold') IS NOT NULL;
INSERT OR IGNORE INTO release_queue (hold_id, queued_at_ms, attempts)
  SELECT json_extract(facts_json, '$.hold'), detached_at_ms, 0 FROM vm
  WHERE detached_at_ms IS NOT NULL AND json_extract(facts_json, '$.hold') IS NOT NULL;
UPDATE vm SET prepared_id = substr(json_extract(facts_json, '$.prepared'), -36)
  WHERE detached_at_ms IS NULL AND json_extract(facts_json, '$.prepared') IS NOT NULL;
UPDATE vm SET facts_json = json_remove(facts_json, '$.hold', '$.prepared');
`;

const step4 = `
-- The epoch whose pages the layer has; null where it was not captured here, or was merged.
ALTER TABLE local_layer ADD COLUMN epoch INTEGER;
`;

const step5 = `
-- 1: the capture of the layer looked at every page, so that with it the chain reads right.
ALTER TABLE local_layer ADD COLUMN complete INTEGER NOT NULL DEFAULT 0;

-- Layers that lack pages, kept until the catalog has marked what needs them.
CREATE TABLE suspect_queue (
  layer_uuid TEXT PRIMARY KEY NOT NULL,
  reason TEXT NOT NULL,
  queued_at_ms INTEGER NOT NULL,
  attempts INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
`;

const step6 = `
-- With pid and start time, one process for good: both begin anew with each boot. Null: of before.
ALTER TABLE vm ADD COLUMN boot_id TEXT;
`;

/** In order; frozen once merged. */
export const schemaSteps: readonly string[] = [step1, step2, step3, step4, step5, step6];

/** The version this program writes. */
export const schemaVersion = schemaSteps.length;

export function bringUpToDate(db: Database): void {
  const done = db.pragma('user_version', { simple: true }) as number;
  if (done > schemaSteps.length) {
    refuse({
      kind: 'node-db-newer',
      message: `${db.name} has schema version ${done}; this program knows up to ${schemaSteps.length}`,
    });
  }
  if (done === schemaSteps.length) return;
  db.transaction(() => {
    for (const step of schemaSteps.slice(done)) db.exec(step);
    db.pragma(`user_version = ${schemaSteps.length}`);
  }).immediate();
}
