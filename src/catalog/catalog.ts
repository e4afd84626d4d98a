/**
 * The catalog's face: what a snapshot needs, who shares it, who uses it, and what may be deleted.
 *
 * C1 A published snapshot's heads, their predecessors and all artifacts exist (foreign keys,
 *    RESTRICT).
 * C2 A layer, a content and an artifact never change once inserted.
 * C3 A key is in exactly one of `upload`, `artifact`, `reclaim`; moving it is one transaction.
 * C4 Every write is idempotent by the id its caller chose: a retry after a lost answer is safe.
 */
import type { ArtifactKind, StoredArtifact } from '../artifact/store.ts';
import type { Result } from '../result.ts';
import type {
  ArtifactKey,
  Bytes,
  ContentId,
  HoldId,
  LayerUuid,
  NodeId,
  SnapshotId,
} from '../units.ts';
import type { CatalogError, CatalogRefusal } from './errors.ts';

export type { CatalogError, CatalogErrorKind, CatalogRefusal } from './errors.ts';

/** A layer that this publish adds. `artifact` comes from `recordUpload`. */
export interface NewLayer {
  readonly uuid: LayerUuid;
  /** Null for a base layer. Otherwise in the catalog, or earlier in the same request. */
  readonly predecessor: LayerUuid | null;
  readonly virtualBytes: Bytes;
  readonly artifact: StoredArtifact;
  /** Its capture looked at every page: with it, the chain reads right whatever lies below. */
  readonly complete?: boolean;
}

/** One chain head: `memory`, `rootfs`, `drive:<id>`. */
export interface ContentHead {
  readonly role: string;
  readonly layer: LayerUuid;
}

/**
 * Another object a content needs, such as `vm-state`; from `recordUpload`, or one the catalog
 * already has.
 */
export interface ContentArtifact {
  readonly name: string;
  readonly artifact: StoredArtifact;
}

export interface PublishRequest {
  readonly snapshotId: SnapshotId;
  readonly contentId: ContentId;
  readonly sourceVm: string;
  readonly nodeId: NodeId;
  readonly createdAtMs: number;
  readonly manifest: StoredArtifact;
  /**
   * Predecessors first. Layers the catalog already has may be left out or repeated with the same
   * facts.
   */
  readonly layers: readonly NewLayer[];
  readonly heads: readonly ContentHead[];
  readonly artifacts: readonly ContentArtifact[];
  readonly alias?: string | undefined;
  /** Taken on the content together with the snapshot. An id that is spent is left as it is. */
  readonly hold?: NewHold | undefined;
}

/** A hold that a publish takes; its node is the publisher. */
export interface NewHold {
  /** Chosen, and made durable, by the caller before this call. */
  readonly holdId: HoldId;
  /** As in `HoldRequest`. */
  readonly purpose: string;
}

export type SnapshotState = 'active' | 'retired';

export interface Snapshot {
  readonly id: SnapshotId;
  readonly state: SnapshotState;
  readonly contentId: ContentId;
  readonly sourceVm: string;
  readonly nodeId: NodeId;
  readonly createdAtMs: number;
  readonly retiredAtMs: number | null;
  /** Set when an operator found the snapshot unfit: it resolves to an error with this reason. */
  readonly invalidReason: string | null;
  /** Set when a verification found that pages of its VM are missing in its layers. */
  readonly suspectReason: string | null;
  readonly aliases: readonly string[];
}

export interface Content {
  readonly id: ContentId;
  readonly manifest: StoredArtifact;
  readonly heads: readonly ContentHead[];
  readonly artifacts: readonly ContentArtifact[];
}

export interface PublishedSnapshot {
  readonly snapshot: Snapshot;
  /** False when an earlier call had already published exactly this. */
  readonly created: boolean;
  /** Whether this call took the hold: false where none was asked for, or its id was spent. */
  readonly held: boolean;
}

/** A usable snapshot, with what it needs. */
export interface ResolvedSnapshot {
  readonly snapshot: Snapshot;
  readonly content: Content;
}

export interface Layer {
  readonly uuid: LayerUuid;
  readonly predecessor: LayerUuid | null;
  readonly virtualBytes: Bytes;
  /** 1 for a base layer, at most 255. */
  readonly depth: number;
  readonly artifact: StoredArtifact;
  readonly createdAtMs: number;
  /** As a snapshot's: of all that needs this layer. */
  readonly suspectReason: string | null;
  /** As a new layer's. */
  readonly complete: boolean;
}

export interface SuspectRequest {
  /** Layers whose captures lost pages. */
  readonly layers: readonly LayerUuid[];
  readonly reason: string;
}

export interface MarkedSuspects {
  /** All that are marked now and need one of the layers. */
  readonly snapshots: readonly SnapshotId[];
  /** Layers that the catalog does not have: not published yet, or deleted since. */
  readonly unknown: readonly LayerUuid[];
}

export interface ListRequest {
  /** From the page before; opaque. */
  readonly cursor?: string | undefined;
  /** 1 to 1000, default 100. */
  readonly limit?: number | undefined;
  readonly sourceVm?: string | undefined;
  /** Exact alias. */
  readonly alias?: string | undefined;
  readonly state?: SnapshotState | undefined;
  /** Inclusive. */
  readonly createdFromMs?: number | undefined;
  /** Exclusive. */
  readonly createdBeforeMs?: number | undefined;
}

export interface SnapshotPage {
  /** Newest first; equal times by id, descending. */
  readonly snapshots: readonly Snapshot[];
  /** Null on the last page. */
  readonly nextCursor: string | null;
}

export type NewUpload = Omit<StoredArtifact, 'key'>;

export interface Upload extends StoredArtifact {
  readonly nodeId: NodeId;
  readonly recordedAtMs: number;
}

export interface HoldRequest {
  /** Chosen, and made durable, by the caller before this call. */
  readonly holdId: HoldId;
  readonly nodeId: NodeId;
  /** `snapshot` is refused when retired; `content` only when it is gone. */
  readonly target: { readonly snapshot: string } | { readonly content: ContentId };
  /** A suspect snapshot is refused unless this is set. Default: false. */
  readonly allowSuspect?: boolean | undefined;
  /** For people: `prepared`, `vm`, `capture`, `paused`, … */
  readonly purpose: string;
}

export interface Hold {
  readonly id: HoldId;
  readonly contentId: ContentId | null;
  readonly nodeId: NodeId | null;
  readonly purpose: string;
  readonly createdAtMs: number;
  readonly releasedAtMs: number | null;
}

export interface Volume {
  readonly id: string;
  readonly contentId: ContentId;
  /** Starts at 1; each switch adds one. */
  readonly version: number;
  readonly createdAtMs: number;
  readonly switchedAtMs: number;
}

export interface NodeRecord {
  readonly id: NodeId;
  readonly address: string | null;
  readonly registeredAtMs: number;
  readonly forgottenAtMs: number | null;
}

export interface ForgottenNode {
  readonly node: NodeRecord;
  readonly holdsReleased: number;
  readonly uploadsReclaimed: number;
}

export type CatalogResult<T, Kind extends CatalogRefusal['kind'] = never> = Promise<
  Result<T, CatalogError | Extract<CatalogRefusal, { kind: Kind | 'request-invalid' }>>
>;

type PublishRefusals =
  | 'alias-taken'
  | 'artifact-conflict'
  | 'chain-too-deep'
  | 'content-conflict'
  | 'hold-conflict'
  | 'layer-conflict'
  | 'layer-missing'
  | 'node-forgotten'
  | 'node-unknown'
  | 'snapshot-conflict'
  | 'upload-missing';

export type PublishError =
  CatalogError | Extract<CatalogRefusal, { kind: PublishRefusals | 'request-invalid' }>;

export interface Catalog {
  readonly dialect: 'sqlite' | 'postgres';

  /** Creates or refreshes the row of this node; every other call that names the node needs it. */
  registerNode(node: {
    nodeId: NodeId;
    address?: string | undefined;
  }): CatalogResult<NodeRecord, 'node-forgotten'>;
  listNodes(): CatalogResult<readonly NodeRecord[]>;
  /** Releases a dead node's holds and queues what it was uploading for reclaim. Its id is spent. */
  forgetNode(nodeId: NodeId): CatalogResult<ForgottenNode, 'node-unknown'>;

  /**
   * Before any byte is stored: names new objects and records that the node is about to write them.
   */
  recordUpload(request: {
    nodeId: NodeId;
    artifacts: readonly NewUpload[];
  }): CatalogResult<readonly StoredArtifact[], 'node-forgotten' | 'node-unknown'>;
  listUploads(nodeId: NodeId): CatalogResult<readonly Upload[]>;
  /** At node start-up: queues all of its uploads but `keep` for reclaim. Returns how many. */
  abandonUploads(nodeId: NodeId, keep: readonly ArtifactKey[]): CatalogResult<number>;
  /** Queues objects for reclaim that were recorded and turned out not to be needed. */
  giveUpUploads(keys: readonly ArtifactKey[]): CatalogResult<number>;

  /** One transaction: new layers, heads and a constant. All or nothing. */
  publish(request: PublishRequest): CatalogResult<PublishedSnapshot, PublishRefusals>;
  /** By snapshot id, else by alias. Retired, invalid and suspect ones are refused: see `show`. */
  resolve(
    idOrAlias: string,
  ): CatalogResult<
    ResolvedSnapshot,
    'snapshot-invalid' | 'snapshot-missing' | 'snapshot-retired' | 'snapshot-suspect'
  >;
  /** Any snapshot, whatever its state. */
  show(idOrAlias: string): CatalogResult<Snapshot, 'snapshot-missing'>;
  findContent(contentId: ContentId): CatalogResult<Content, 'content-missing'>;
  list(request: ListRequest): CatalogResult<SnapshotPage>;
  /** Those of the given layers that the catalog has. */
  findLayers(uuids: readonly LayerUuid[]): CatalogResult<readonly Layer[]>;
  /** The chain of a layer, bottom to top. */
  lineage(head: LayerUuid): CatalogResult<readonly Layer[], 'layer-missing'>;
  /** Names a snapshot for good. */
  addAlias(
    alias: string,
    snapshotId: SnapshotId,
  ): CatalogResult<void, 'alias-taken' | 'snapshot-missing' | 'snapshot-retired'>;
  /** Hides a snapshot from new users. Retiring it again returns the same. */
  retire(idOrAlias: string): CatalogResult<Snapshot, 'snapshot-missing'>;
  /**
   * Marks a snapshot unfit, with the reason that `resolve` then gives. Null takes the mark away.
   */
  setInvalid(idOrAlias: string, reason: string | null): CatalogResult<Snapshot, 'snapshot-missing'>;
  /** Marks layers that lack pages, what sits on them, and the snapshots that need them. */
  markSuspects(request: SuspectRequest): CatalogResult<MarkedSuspects>;
  /** Marks one snapshot, or takes its mark away. Those made of it later are as their layers say. */
  setSuspect(idOrAlias: string, reason: string | null): CatalogResult<Snapshot, 'snapshot-missing'>;

  hold(
    request: HoldRequest,
  ): CatalogResult<
    Hold,
    | 'content-missing'
    | 'hold-conflict'
    | 'hold-released'
    | 'node-forgotten'
    | 'node-unknown'
    | 'snapshot-invalid'
    | 'snapshot-missing'
    | 'snapshot-retired'
    | 'snapshot-suspect'
  >;
  /**
   * Releasing twice, or a hold whose `hold` call never arrived, succeeds; that hold can then never
   * be taken.
   */
  release(holdId: HoldId): CatalogResult<void>;
  /** Many at once, in one transaction: what the release queue sends. */
  releaseMany(holdIds: readonly HoldId[]): CatalogResult<void>;
  listHolds(filter: {
    nodeId?: NodeId | undefined;
    contentId?: ContentId | undefined;
    /** Default: only open ones. */
    closed?: boolean | undefined;
    limit?: number | undefined;
  }): CatalogResult<readonly Hold[]>;

  /** How many holds the node has open, and how many objects wait for deletion. For gauges. */
  counts(nodeId: NodeId): CatalogResult<{ readonly openHolds: number; readonly backlog: number }>;

  createVolume(volume: {
    id: string;
    contentId: ContentId;
  }): CatalogResult<Volume, 'content-missing' | 'volume-conflict'>;
  findVolume(id: string): CatalogResult<Volume, 'volume-missing'>;
  listVolumes(request: { after?: string; limit?: number }): CatalogResult<readonly Volume[]>;
  /**
   * Compare-and-set: only when the volume is still at `version`. Users of the old backing keep it.
   */
  switchVolume(request: {
    id: string;
    version: number;
    contentId: ContentId;
  }): CatalogResult<Volume, 'content-missing' | 'volume-missing' | 'volume-moved'>;
  deleteVolume(id: string): CatalogResult<void>;

  /** One trivial query; for /readyz. */
  ping(): CatalogResult<void>;
  close(): Promise<void>;
}

export type { ArtifactKind };
