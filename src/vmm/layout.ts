/**
 * Memory layouts: which part of the image is where in the VMM's address space, checked before use.
 */
import type { MemoryLayout, MemoryRegion } from '../memory.ts';
import { err, ok, type Result } from '../result.ts';
import { PAGE_BYTES, bytes } from '../units.ts';
import { badAnswer, vmmError, type VmmError } from './errors.ts';

/** A page size that some kernel maps guest memory with. */
export function isPageSize(size: number): boolean {
  return size >= PAGE_BYTES && size <= PAGE_BYTES_MAX && Number.isInteger(Math.log2(size));
}

/** Larger images are refused: their bitmap alone would be 128 MiB. */
export const IMAGE_BYTES_MAX = 4 * 2 ** 40;

const PAGE_BYTES_MAX = 2 ** 30;
const ADDRESS_END = 2n ** 64n;

/**
 * A layout from regions in any order. They must be whole pages, not empty, tile the image from its
 * start without gap or overlap, and not overlap in the VMM's address space.
 * @param what the answer that named the regions, for the message
 * @param field the list's name in it
 */
export function buildLayout(
  regions: readonly MemoryRegion[],
  what: string,
  field: string,
): Result<MemoryLayout, VmmError> {
  if (regions.length === 0) return err(badAnswer(what, field, 'names no memory region'));
  for (const [index, region] of regions.entries()) {
    const problem = regionProblem(region);
    if (problem !== null) return err(badAnswer(what, `${field}[${index}]`, problem));
  }
  const ascending = [...regions].sort((a, b) => a.imageOffset - b.imageOffset);
  let end = 0;
  for (const region of ascending) {
    if (region.imageOffset !== end) {
      const how = region.imageOffset > end ? 'leave a gap in' : 'overlap in';
      const problem = `regions ${how} the image at ${hex(Math.min(end, region.imageOffset))}`;
      return err(badAnswer(what, field, problem));
    }
    end = region.imageOffset + region.length;
  }
  if (end > IMAGE_BYTES_MAX) {
    return err(badAnswer(what, field, `add up to ${end} bytes; the limit is ${IMAGE_BYTES_MAX}`));
  }
  const overlap = hostOverlap(ascending);
  if (overlap !== null) return err(badAnswer(what, field, overlap));
  return ok({ regions: ascending, imageBytes: bytes(end) });
}

function regionProblem(region: MemoryRegion): string | null {
  const { imageOffset, length, hostAddress } = region;
  if (length === 0) return 'has length 0';
  if (length % PAGE_BYTES !== 0) return `has a length of ${length} bytes, not whole pages`;
  if (imageOffset % PAGE_BYTES !== 0) return `has image offset ${imageOffset}, not a whole page`;
  if (hostAddress % BigInt(PAGE_BYTES) !== 0n) {
    return `has host address 0x${hostAddress.toString(16)}, not a whole page`;
  }
  if (hostAddress + BigInt(length) > ADDRESS_END) return 'runs past the end of the address space';
  return null;
}

function hostOverlap(regions: readonly MemoryRegion[]): string | null {
  const byAddress = [...regions].sort((a, b) => (a.hostAddress < b.hostAddress ? -1 : 1));
  for (let i = 1; i < byAddress.length; i += 1) {
    const before = byAddress[i - 1];
    const region = byAddress[i];
    if (before === undefined || region === undefined) continue;
    if (before.hostAddress + BigInt(before.length) > region.hostAddress) {
      return `regions overlap at host address 0x${region.hostAddress.toString(16)}`;
    }
  }
  return null;
}

/**
 * What changed between two layouts of one VM, in words; null where nothing did.
 * @param addresses whether a region at another host address counts: yes within one process, no
 *   between a VM and another one restored from it
 */
export function layoutChange(
  before: MemoryLayout,
  after: MemoryLayout,
  addresses: boolean,
): string | null {
  const changes: string[] = [];
  const old = new Map(before.regions.map((region) => [region.imageOffset, region]));
  for (const region of after.regions) {
    const was = old.get(region.imageOffset);
    old.delete(region.imageOffset);
    const at = `the region at image offset ${hex(region.imageOffset)}`;
    if (was === undefined) changes.push(`${at} (${region.length} bytes) was added`);
    else if (was.length !== region.length) {
      changes.push(`${at} went from ${was.length} to ${region.length} bytes`);
    } else if (addresses && was.hostAddress !== region.hostAddress) {
      changes.push(`${at} moved in the VMM's address space`);
    }
  }
  for (const was of old.values()) {
    const at = `the region at image offset ${hex(was.imageOffset)}`;
    changes.push(`${at} (${was.length} bytes) was removed`);
  }
  return changes.length === 0 ? null : changes.join('; ');
}

/** Fails with `layout-changed` and what changed. */
export function requireSameLayout(
  before: MemoryLayout | null,
  after: MemoryLayout,
  socketPath: string,
): Result<MemoryLayout, VmmError> {
  const change = before === null ? null : layoutChange(before, after, true);
  if (change === null) return ok(after);
  const message = `the memory layout of the VM at ${socketPath} changed: ${change}`;
  return err(vmmError('layout-changed', message, { socketPath }));
}

/** Rows of 3 [image offset, length, host address], as the native calls take them. */
export function layoutRows(layout: MemoryLayout): BigUint64Array {
  const rows = new BigUint64Array(layout.regions.length * 3);
  for (const [index, region] of layout.regions.entries()) {
    rows[index * 3] = BigInt(region.imageOffset);
    rows[index * 3 + 1] = BigInt(region.length);
    rows[index * 3 + 2] = region.hostAddress;
  }
  return rows;
}

function hex(value: number): string {
  return `0x${value.toString(16)}`;
}
