/**
 * All catalog migrations, oldest first. A merged one is frozen: it is never edited, renamed,
 * reordered or removed, and imports nothing of ours. `breaking: false` means older programs may go
 * on using the database: only what they neither read nor violate was added.
 */
import { createLayer } from './0001-create-layer.ts';
import { createSnapshot } from './0002-create-snapshot.ts';
import { createHold } from './0003-create-hold.ts';
import { createReclaim } from './0004-create-reclaim.ts';
import { markSuspects } from './0005-mark-suspects.ts';

/** How a dialect spells the column types that migrations use. */
export interface ColumnTypes {
  /** Text compared byte by byte. */
  readonly text: string;
  /** A 64-bit integer. */
  readonly int8: string;
  /** What follows the closing parenthesis of CREATE TABLE. */
  readonly suffix: string;
}

export interface Migration {
  readonly id: string;
  readonly breaking: boolean;
  /** Statements, run in order in one transaction. */
  readonly up: (types: ColumnTypes) => readonly string[];
}

export const migrations: readonly Migration[] = [
  createLayer,
  createSnapshot,
  createHold,
  createReclaim,
  markSuspects,
];
