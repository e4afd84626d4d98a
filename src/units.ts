/**
 * Units and identifiers, as types. An *index* is 0-based, a *count* is how many, a *size* is bytes.
 * Casts live here and in tests; everything else crosses units by the named functions below.
 */
declare const unit: unique symbol;
type Unit<Base, Name extends string> = Base & { readonly [unit]: Name };

/** A size in bytes, a safe non-negative integer. */
export type Bytes = Unit<number, 'Bytes'>;
/** 0-based index of a 4 KiB page within a memory image. */
export type PageIndex = Unit<number, 'PageIndex'>;
/** How many 4 KiB pages. */
export type PageCount = Unit<number, 'PageCount'>;
/** 0-based index of a 512-byte sector. */
export type SectorIndex = Unit<number, 'SectorIndex'>;
/** How many 512-byte sectors. */
export type SectorCount = Unit<number, 'SectorCount'>;
/** A duration in milliseconds. */
export type Millis = Unit<number, 'Millis'>;
/** An address in the VMM's own address space. Always exact: never a JavaScript number. */
export type HostAddress = Unit<bigint, 'HostAddress'>;
/** A guest-physical address. */
export type GuestAddress = Unit<bigint, 'GuestAddress'>;

export type VmId = Unit<string, 'VmId'>;
export type CaptureId = Unit<string, 'CaptureId'>;
/** Lowercase RFC 4122 text; written to layers in uppercase. */
export type LayerUuid = Unit<string, 'LayerUuid'>;
/** `sha256:` and 64 lowercase hex digits. */
export type Digest = Unit<string, 'Digest'>;
export type ArtifactKey = Unit<string, 'ArtifactKey'>;
export type SnapshotId = Unit<string, 'SnapshotId'>;
export type ContentId = Unit<string, 'ContentId'>;
export type HoldId = Unit<string, 'HoldId'>;
export type NodeId = Unit<string, 'NodeId'>;

/** Guest page size that layers, bitmaps and ledgers use. */
export const PAGE_BYTES = 4096;

/** Layers that a chain can have: OverlayBD readers stop there. Source: FORMAT.md §1. */
export const CHAIN_LAYERS_MAX = 255;
/** Unit of LSMT index entries. */
export const SECTOR_BYTES = 512;
export const SECTORS_PER_PAGE = PAGE_BYTES / SECTOR_BYTES;

export const KIB = 1024;
export const MIB = 1024 * KIB;
export const GIB = 1024 * MIB;

function safe(value: number, what: string): number {
  if (!Number.isSafeInteger(value) || value < 0) {
    throw new RangeError(`${what} must be a non-negative safe integer, got ${value}`);
  }
  return value;
}

export const bytes = (value: number): Bytes => safe(value, 'bytes') as Bytes;
export const pageIndex = (value: number): PageIndex => safe(value, 'page index') as PageIndex;
export const pageCount = (value: number): PageCount => safe(value, 'page count') as PageCount;
export const sectorIndex = (value: number): SectorIndex =>
  safe(value, 'sector index') as SectorIndex;
export const sectorCount = (value: number): SectorCount =>
  safe(value, 'sector count') as SectorCount;
export const millis = (value: number): Millis => value as Millis;
export const hostAddress = (value: bigint): HostAddress => value as HostAddress;
export const guestAddress = (value: bigint): GuestAddress => value as GuestAddress;

export const pagesToBytes = (count: PageCount | PageIndex): Bytes => bytes(count * PAGE_BYTES);
export const pagesCeil = (size: Bytes): PageCount => pageCount(Math.ceil(size / PAGE_BYTES));
export function pagesExact(size: Bytes): PageCount {
  if (size % PAGE_BYTES !== 0) throw new RangeError(`${size} bytes is not a whole number of pages`);
  return pageCount(size / PAGE_BYTES);
}
export const sectorsToBytes = (count: SectorCount | SectorIndex): Bytes =>
  bytes(count * SECTOR_BYTES);
export function sectorsExact(size: Bytes): SectorCount {
  if (size % SECTOR_BYTES !== 0) throw new RangeError(`${size} bytes is not whole sectors`);
  return sectorCount(size / SECTOR_BYTES);
}

/** A bigint as a number, refused where that would round. */
export function exactNumber(value: bigint, what: string): number {
  const n = Number(value);
  if (!Number.isSafeInteger(n)) throw new RangeError(`${what} ${value} is beyond 2^53`);
  return n;
}

export const vmId = (value: string): VmId => value as VmId;
export const captureId = (value: string): CaptureId => value as CaptureId;
export const layerUuid = (value: string): LayerUuid => value.toLowerCase() as LayerUuid;
export const artifactKey = (value: string): ArtifactKey => value as ArtifactKey;
export const snapshotId = (value: string): SnapshotId => value as SnapshotId;
export const contentId = (value: string): ContentId => value as ContentId;
export const holdId = (value: string): HoldId => value as HoldId;
export const nodeId = (value: string): NodeId => value as NodeId;

const digestPattern = /^sha256:[0-9a-f]{64}$/;
export const isDigest = (value: string): value is Digest => digestPattern.test(value);
export function digest(value: string): Digest {
  if (!isDigest(value)) throw new RangeError(`not a digest: ${JSON.stringify(value.slice(0, 80))}`);
  return value;
}
