/** Contents with their chain heads and objects, snapshots, aliases. */
interface ColumnTypes {
  readonly text: string;
  readonly int8: string;
  readonly suffix: string;
}

export const createSnapshot = {
  id: '0002-create-snapshot',
  breaking: true,
  up: ({ text, int8, suffix }: ColumnTypes): readonly string[] => [
    `CREATE TABLE content (
      id ${text} NOT NULL PRIMARY KEY,
      manifest_key ${text} NOT NULL UNIQUE REFERENCES artifact (key) ON DELETE RESTRICT,
      fingerprint ${text} NOT NULL,
      created_at_ms ${int8} NOT NULL
    )${suffix}`,
    `CREATE TABLE content_head (
      content_id ${text} NOT NULL REFERENCES content (id) ON DELETE RESTRICT,
      role ${text} NOT NULL,
      layer_uuid ${text} NOT NULL REFERENCES layer (uuid) ON DELETE RESTRICT,
      PRIMARY KEY (content_id, role)
    )${suffix}`,
    `CREATE INDEX content_head_layer ON content_head (layer_uuid)`,
    `CREATE TABLE content_artifact (
      content_id ${text} NOT NULL REFERENCES content (id) ON DELETE RESTRICT,
      name ${text} NOT NULL,
      artifact_key ${text} NOT NULL REFERENCES artifact (key) ON DELETE RESTRICT,
      PRIMARY KEY (content_id, name)
    )${suffix}`,
    `CREATE INDEX content_artifact_key ON content_artifact (artifact_key)`,
    `CREATE TABLE snapshot (
      id ${text} NOT NULL PRIMARY KEY,
      content_id ${text} REFERENCES content (id) ON DELETE RESTRICT,
      published_content_id ${text} NOT NULL,
      source_vm ${text} NOT NULL,
      node_id ${text} NOT NULL REFERENCES node (id) ON DELETE RESTRICT,
      created_at_ms ${int8} NOT NULL,
      retired_at_ms ${int8},
      invalid_reason ${text},
      CHECK ((content_id IS NULL) = (retired_at_ms IS NOT NULL))
    )${suffix}`,
    `CREATE INDEX snapshot_content ON snapshot (content_id) WHERE content_id IS NOT NULL`,
    `CREATE INDEX snapshot_created ON snapshot (created_at_ms, id)`,
    `CREATE INDEX snapshot_source ON snapshot (source_vm, created_at_ms, id)`,
    `CREATE INDEX snapshot_retired ON snapshot (retired_at_ms) WHERE retired_at_ms IS NOT NULL`,
    `CREATE TABLE alias (
      name ${text} NOT NULL PRIMARY KEY,
      snapshot_id ${text} REFERENCES snapshot (id) ON DELETE RESTRICT,
      named_snapshot_id ${text} NOT NULL,
      created_at_ms ${int8} NOT NULL
    )${suffix}`,
    `CREATE INDEX alias_snapshot ON alias (snapshot_id) WHERE snapshot_id IS NOT NULL`,
  ],
} as const;
