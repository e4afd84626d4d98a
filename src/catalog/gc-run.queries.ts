/** Table `gc_run`: what each collection did. */
import type { ColumnType } from 'kysely';

export interface GcRunTable {
  readonly id: ColumnType<string, string, never>;
  readonly collector: ColumnType<string, string, never>;
  readonly started_at_ms: ColumnType<number, number, never>;
  readonly finished_at_ms: number | null;
  readonly outcome: string | null;
  readonly message: string | null;
  readonly contents_deleted: number;
  readonly layers_condemned: number;
  readonly artifacts_reclaimed: number;
  readonly bytes_reclaimed: number;
}
