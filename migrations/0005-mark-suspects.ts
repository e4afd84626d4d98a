/** Layers and snapshots that a verification found to lack pages. Older programs ignore the marks. */
interface ColumnTypes {
  readonly text: string;
  readonly int8: string;
}

export const markSuspects = {
  id: '0005-mark-suspects',
  breaking: false,
  up: ({ text, int8 }: ColumnTypes): readonly string[] => [
    `ALTER TABLE layer ADD COLUMN suspect_reason ${text}`,
    `ALTER TABLE layer ADD COLUMN complete ${int8} NOT NULL DEFAULT 0`,
    `ALTER TABLE snapshot ADD COLUMN suspect_reason ${text}`,
  ],
} as const;
