/** Claims that keep a content readable: holds, and volumes by their backing. */
interface ColumnTypes {
  readonly text: string;
  readonly int8: string;
  readonly suffix: string;
}

export const createHold = {
  id: '0003-create-hold',
  breaking: true,
  up: ({ text, int8, suffix }: ColumnTypes): readonly string[] => [
    `CREATE TABLE hold (
      id ${text} NOT NULL PRIMARY KEY,
      content_id ${text} REFERENCES content (id) ON DELETE RESTRICT,
      held_content_id ${text},
      node_id ${text} REFERENCES node (id) ON DELETE RESTRICT,
      purpose ${text} NOT NULL,
      created_at_ms ${int8} NOT NULL,
      released_at_ms ${int8},
      CHECK ((content_id IS NULL) = (released_at_ms IS NOT NULL)),
      CHECK (content_id IS NULL OR node_id IS NOT NULL)
    )${suffix}`,
    `CREATE INDEX hold_content ON hold (content_id) WHERE content_id IS NOT NULL`,
    `CREATE INDEX hold_node ON hold (node_id) WHERE released_at_ms IS NULL`,
    `CREATE INDEX hold_released ON hold (released_at_ms) WHERE released_at_ms IS NOT NULL`,
    `CREATE TABLE volume (
      id ${text} NOT NULL PRIMARY KEY,
      content_id ${text} NOT NULL REFERENCES content (id) ON DELETE RESTRICT,
      version ${int8} NOT NULL CHECK (version >= 1),
      created_at_ms ${int8} NOT NULL,
      switched_at_ms ${int8} NOT NULL
    )${suffix}`,
    `CREATE INDEX volume_content ON volume (content_id)`,
  ],
} as const;
