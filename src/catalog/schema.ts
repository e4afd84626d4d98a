/** All tables, as Kysely sees them. A test compares this with what the migrations make. */
import type { AliasTable } from './alias.queries.ts';
import type { ArtifactTable } from './artifact.queries.ts';
import type { CandidateContentTable, CandidateLayerTable } from './candidate.queries.ts';
import type { ContentArtifactTable, ContentHeadTable, ContentTable } from './content.queries.ts';
import type { GcRunTable } from './gc-run.queries.ts';
import type { HoldTable } from './hold.queries.ts';
import type { LayerTable } from './layer.queries.ts';
import type { NodeTable } from './node.queries.ts';
import type { ReclaimTable } from './reclaim.queries.ts';
import type { SnapshotTable } from './snapshot.queries.ts';
import type { UploadTable } from './upload.queries.ts';
import type { VolumeTable } from './volume.queries.ts';

export interface MigrationTable {
  readonly id: string;
  readonly breaking: number;
  readonly applied_at_ms: number;
}

export interface CatalogSchema {
  alias: AliasTable;
  artifact: ArtifactTable;
  candidate_content: CandidateContentTable;
  candidate_layer: CandidateLayerTable;
  content: ContentTable;
  content_artifact: ContentArtifactTable;
  content_head: ContentHeadTable;
  gc_run: GcRunTable;
  hold: HoldTable;
  layer: LayerTable;
  migration: MigrationTable;
  node: NodeTable;
  reclaim: ReclaimTable;
  snapshot: SnapshotTable;
  upload: UploadTable;
  volume: VolumeTable;
}
