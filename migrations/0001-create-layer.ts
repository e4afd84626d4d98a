/** Nodes, objects of bytes and their upload intents, and layers. */
interface ColumnTypes {
  readonly text: string;
  readonly int8: string;
  readonly suffix: string;
}

export const createLayer = {
  id: '0001-create-layer',
  breaking: true,
  up: ({ text, int8, suffix }: ColumnTypes): readonly string[] => [
    `CREATE TABLE node (
      id ${text} NOT NULL PRIMARY KEY,
      address ${text},
      registered_at_ms ${int8} NOT NULL,
      forgotten_at_ms ${int8}
    )${suffix}`,
    `CREATE TABLE artifact (
      key ${text} NOT NULL PRIMARY KEY,
      kind ${text} NOT NULL,
      digest ${text} NOT NULL,
      size_bytes ${int8} NOT NULL CHECK (size_bytes BETWEEN 0 AND 9007199254740991),
      created_at_ms ${int8} NOT NULL
    )${suffix}`,
    `CREATE TABLE upload (
      artifact_key ${text} NOT NULL PRIMARY KEY,
      kind ${text} NOT NULL,
      digest ${text} NOT NULL,
      size_bytes ${int8} NOT NULL CHECK (size_bytes BETWEEN 0 AND 9007199254740991),
      node_id ${text} NOT NULL REFERENCES node (id) ON DELETE RESTRICT,
      recorded_at_ms ${int8} NOT NULL
    )${suffix}`,
    `CREATE INDEX upload_node ON upload (node_id)`,
    `CREATE TABLE layer (
      uuid ${text} NOT NULL PRIMARY KEY,
      predecessor ${text} REFERENCES layer (uuid) ON DELETE RESTRICT,
      artifact_key ${text} NOT NULL UNIQUE REFERENCES artifact (key) ON DELETE RESTRICT,
      virtual_bytes ${int8} NOT NULL CHECK (virtual_bytes BETWEEN 0 AND 9007199254740991),
      depth ${int8} NOT NULL CHECK (depth BETWEEN 1 AND 255),
      created_at_ms ${int8} NOT NULL,
      CHECK (predecessor <> uuid),
      CHECK ((predecessor IS NULL) = (depth = 1))
    )${suffix}`,
    `CREATE INDEX layer_predecessor ON layer (predecessor) WHERE predecessor IS NOT NULL`,
  ],
} as const;
