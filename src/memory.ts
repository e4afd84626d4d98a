import type { Bytes, GuestAddress, HostAddress, PageCount } from './units.ts';

/**
 * One contiguous piece of guest memory. The image is the concatenation of all regions in
 * guest-physical order: address-space gaps (such as the x86 MMIO gap) have no place in it.
 */
export interface MemoryRegion {
  /** Where the region starts in guest-physical space; null where the VMM does not say. */
  readonly guestAddress: GuestAddress | null;
  /** Where the region is mapped in the VMM process. */
  readonly hostAddress: HostAddress;
  /** Offset of the region in the memory image. */
  readonly imageOffset: Bytes;
  readonly length: Bytes;
}

/** Regions ascending in `imageOffset`, adjacent, without overlap. */
export interface MemoryLayout {
  readonly regions: readonly MemoryRegion[];
  /** Size of the image: the sum of the regions' lengths. */
  readonly imageBytes: Bytes;
}

/**
 * One bit per 4 KiB page of the image, least significant bit first, in whole 64-bit words; bits
 * past `pageCount` are 0. A 64 GiB guest takes 2 MiB.
 */
export interface PageBitmap {
  readonly pageCount: PageCount;
  readonly bits: Uint8Array;
}
