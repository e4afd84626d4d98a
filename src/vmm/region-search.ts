/**
 * Where the memory regions begin and end, when the VMM only says where some pages are. The address
 * map bounds each region; a boundary is taken only where the bounds leave one place for it. Nothing
 * is guessed: a wrong region would read other memory and store it as the guest's.
 */
import type { MemoryLayout, MemoryRegion } from '../memory.ts';
import { bytes, hostAddress } from '../units.ts';
import { writableRuns, type AddressRange, type Vma } from './address-map.ts';

/** A run of the image that is mapped at one distance from its offset. */
export interface Span {
  readonly imageStart: number;
  readonly imageEnd: number;
  /** Host address minus image offset, modulo 2^64. */
  readonly delta: bigint;
}

/**
 * Regions that tile the image, one around each span. Null where the address map leaves it open.
 * First each mapping counts by itself, then neighbouring ones as one: a region may be in several
 * mappings, and several regions in one.
 */
export function completeSpans(
  spans: readonly Span[],
  vmas: readonly Vma[],
  imageBytes: number,
): MemoryLayout | null {
  const writable = vmas.filter((vma) => vma.writable);
  const regions = tile(spans, writable, imageBytes) ?? tile(spans, writableRuns(vmas), imageBytes);
  return regions === null ? null : { regions, imageBytes: bytes(imageBytes) };
}

function tile(
  spans: readonly Span[],
  mapped: readonly AddressRange[],
  imageBytes: number,
): MemoryRegion[] | null {
  const regions: MemoryRegion[] = [];
  // Host addresses where a region is known to begin or end: no other region reaches across.
  const edges: bigint[] = [];
  const last = spans.at(-1);
  const first = spans[0];
  if (first === undefined || last === undefined) return null;
  edges.push(at(first, 0), at(last, imageBytes));
  let start = 0;
  for (const [index, span] of spans.entries()) {
    const reach = reachOf(span, mapped, edges, imageBytes);
    if (reach === null || reach.start > start) return null;
    const next = spans[index + 1];
    const end = next === undefined ? imageBytes : boundary(span, reach, next, mapped, edges);
    if (end === null || end > reach.end) return null;
    regions.push({
      guestAddress: null,
      hostAddress: hostAddress(at(span, start)),
      imageOffset: bytes(start),
      length: bytes(end - start),
    });
    start = end;
    if (next !== undefined) edges.push(at(span, end), at(next, end));
  }
  return regions;

  function boundary(
    span: Span,
    reach: Reach,
    next: Span,
    ranges: readonly AddressRange[],
    known: readonly bigint[],
  ): number | null {
    if (span.imageEnd === next.imageStart) return span.imageEnd;
    const nextReach = reachOf(next, ranges, known, imageBytes);
    return nextReach?.start === reach.end ? reach.end : null;
  }
}

interface Reach {
  readonly start: number;
  readonly end: number;
}

/** How far a region can stretch around its span, in image offsets. */
function reachOf(
  span: Span,
  mapped: readonly AddressRange[],
  edges: readonly bigint[],
  imageBytes: number,
): Reach | null {
  const hostStart = at(span, span.imageStart);
  const hostEnd = hostStart + BigInt(span.imageEnd - span.imageStart);
  const around = mapped.find((range) => range.start <= hostStart && hostEnd <= range.end);
  if (around === undefined) return null;
  let low = around.start;
  let high = around.end;
  for (const edge of edges) {
    if (edge <= hostStart && edge > low) low = edge;
    if (edge >= hostEnd && edge < high) high = edge;
  }
  const before = hostStart - low;
  const after = high - hostEnd;
  return {
    start: before >= BigInt(span.imageStart) ? 0 : span.imageStart - Number(before),
    end: Math.min(imageBytes, span.imageEnd + Number(after)),
  };
}

function at(span: Span, imageOffset: number): bigint {
  return BigInt.asUintN(64, span.delta + BigInt(imageOffset));
}

/**
 * The layout of a VM that was restored from a memory file: private mappings of one file whose
 * offsets are the image's. Parts that were replaced by anonymous memory (removed by a balloon) are
 * filled in where their neighbours leave one way to do it. Null where there is none, or more than
 * one.
 */
export function fileLayout(vmas: readonly Vma[], imageBytes: number): MemoryLayout | null {
  const byFile = new Map<string, Vma[]>();
  for (const vma of vmas) {
    if (vma.file === null || vma.shared || !vma.writable) continue;
    byFile.set(vma.file, [...(byFile.get(vma.file) ?? []), vma]);
  }
  const layouts: MemoryLayout[] = [];
  for (const mapped of byFile.values()) {
    const spans = mergeByDelta(mapped);
    if (spans.some((span) => span.imageEnd > imageBytes)) continue;
    const layout = completeSpans(spans, vmas, imageBytes);
    if (layout !== null) layouts.push(layout);
  }
  return layouts.length === 1 ? (layouts[0] ?? null) : null;
}

function mergeByDelta(vmas: readonly Vma[]): Span[] {
  const spans = new Map<bigint, { imageStart: number; imageEnd: number; delta: bigint }>();
  for (const vma of vmas) {
    const delta = BigInt.asUintN(64, vma.start - vma.offset);
    const imageStart = Number(vma.offset);
    const imageEnd = imageStart + Number(vma.end - vma.start);
    const span = spans.get(delta);
    if (span === undefined) spans.set(delta, { imageStart, imageEnd, delta });
    else {
      span.imageStart = Math.min(span.imageStart, imageStart);
      span.imageEnd = Math.max(span.imageEnd, imageEnd);
    }
  }
  return [...spans.values()].sort((a, b) => a.imageStart - b.imageStart);
}

export function oneRegion(host: bigint, imageBytes: number): MemoryLayout {
  const length = bytes(imageBytes);
  const imageOffset = bytes(0);
  const region = { guestAddress: null, hostAddress: hostAddress(host), imageOffset, length };
  return { regions: [region], imageBytes: length };
}
