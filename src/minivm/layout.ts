import { GIB, MIB, PAGE_BYTES } from '../units.ts';
import { VmmFault } from './answer.ts';

export interface RegionSpec {
  readonly guestAddress: bigint;
  /** Whole pages. */
  readonly bytes: number;
}

/** The x86 gap for devices: no RAM between 3 GiB and 4 GiB of guest-physical address. */
const GAP_START = BigInt(3 * GIB);
const GAP_END = BigInt(4 * GIB);
const REGIONS_MAX = 64;

/** Where a VM of this size has its RAM: below the gap, and the rest from 4 GiB on. */
export function regionsOfSize(memSizeMib: number): RegionSpec[] {
  const bytes = memSizeMib * MIB;
  const low = Math.min(bytes, 3 * GIB);
  const regions: RegionSpec[] = [{ guestAddress: 0n, bytes: low }];
  if (bytes > low) regions.push({ guestAddress: GAP_END, bytes: bytes - low });
  return regions;
}

/** Refuses regions that are empty, not whole pages, out of order, overlapping, or in the gap. */
export function checkRegions(regions: readonly RegionSpec[]): void {
  if (regions.length === 0) throw new VmmFault('A VM needs a memory region');
  if (regions.length > REGIONS_MAX) {
    throw new VmmFault(`A VM has at most ${REGIONS_MAX} memory regions`);
  }
  let end = 0n;
  for (const { guestAddress, bytes } of regions) {
    const at = `The region at 0x${guestAddress.toString(16)}`;
    if (bytes <= 0 || bytes % PAGE_BYTES !== 0 || guestAddress % BigInt(PAGE_BYTES) !== 0n) {
      throw new VmmFault(`${at} is not whole pages`);
    }
    if (guestAddress < end) throw new VmmFault(`${at} overlaps the one before it`);
    end = guestAddress + BigInt(bytes);
    if (guestAddress < GAP_END && end > GAP_START) {
      throw new VmmFault(`${at} reaches into the device gap from 3 GiB to 4 GiB`);
    }
  }
}

export const toRows = (regions: readonly RegionSpec[]): BigUint64Array =>
  BigUint64Array.from(regions.flatMap(({ guestAddress, bytes }) => [guestAddress, BigInt(bytes)]));
