/** Queues of garbage collection: what may have become unused, and bytes that are to be deleted. */
interface ColumnTypes {
  readonly text: string;
  readonly int8: string;
  readonly suffix: string;
}

export const createReclaim = {
  id: '0004-create-reclaim',
  breaking: true,
  up: ({ text, int8, suffix }: ColumnTypes): readonly string[] => [
    `CREATE TABLE candidate_content (
      content_id ${text} NOT NULL PRIMARY KEY REFERENCES content (id) ON DELETE RESTRICT,
      queued_at_ms ${int8} NOT NULL
    )${suffix}`,
    `CREATE TABLE candidate_layer (
      layer_uuid ${text} NOT NULL PRIMARY KEY REFERENCES layer (uuid) ON DELETE RESTRICT,
      queued_at_ms ${int8} NOT NULL
    )${suffix}`,
    `CREATE TABLE reclaim (
      artifact_key ${text} NOT NULL PRIMARY KEY,
      kind ${text} NOT NULL,
      digest ${text} NOT NULL,
      size_bytes ${int8} NOT NULL,
      queued_at_ms ${int8} NOT NULL,
      fence ${int8} NOT NULL,
      claimed_until_ms ${int8} NOT NULL,
      claimed_by ${text}
    )${suffix}`,
    `CREATE INDEX reclaim_claimable ON reclaim (claimed_until_ms, artifact_key)`,
    `CREATE TABLE gc_run (
      id ${text} NOT NULL PRIMARY KEY,
      collector ${text} NOT NULL,
      started_at_ms ${int8} NOT NULL,
      finished_at_ms ${int8},
      outcome ${text},
      message ${text},
      contents_deleted ${int8} NOT NULL,
      layers_condemned ${int8} NOT NULL,
      artifacts_reclaimed ${int8} NOT NULL,
      bytes_reclaimed ${int8} NOT NULL
    )${suffix}`,
    `CREATE INDEX gc_run_started ON gc_run (started_at_ms, id)`,
  ],
} as const;
