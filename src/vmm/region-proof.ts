/**
 * Finds guest memory in a VMM's address space by what it holds. The kernel merges anonymous mappings
 * with what lies beside them (another region, in either order, or the VMM's own heap), so that the
 * address map alone does not say where a region begins. A memory file of the paused VM says which
 * bytes are at which image offset: every page-aligned place that a region could have is compared
 * with pages that tell places apart, and one place must be left. Nothing is guessed: a wrong region
 * would reveal the VMM's heap.
 */
import type { MemoryLayout, MemoryRegion, PageBitmap } from '../memory.ts';
import { readProcess } from '../native/guest.ts';
import { GIB, MIB, PAGE_BYTES, bytes, hostAddress } from '../units.ts';
import { writableRuns, type AddressRange, type Vma } from './address-map.ts';
import { hasPage } from './bitmap.ts';
import { orFail } from './errors.ts';
import { buildLayout } from './layout.ts';
import { oneRegion } from './region-search.ts';
import { scanPages } from './residency.ts';
import { sameBytes, tellingSample, type TellingPage } from './sample.ts';

export interface ProofRequest {
  readonly pid: number;
  /** The paused VMM's address map. */
  readonly vmas: readonly Vma[];
  readonly imageBytes: number;
  /** A memory file of this very moment. */
  readonly path: string;
  /** What the file has. */
  readonly pages: PageBitmap;
  /** How many of them are looked at; more where most may be zero. */
  readonly samplesMax: number;
  readonly signal: AbortSignal;
}

/** Where Firecracker's first region ends: 3 GiB, and 3.25 GiB before 1.11. */
const gapStarts = [3 * GIB, 3 * GIB + 256 * MIB];

/** Telling pages that each place is compared by; then the whole layout is, with a new sample. */
const SEARCH_PAGES = 12;
/** What is read of one page at one place. */
const SEARCH_BYTES = 64;
/** Places that are compared, at most; more are left open. */
const PLACES_MAX = 1 << 17;

/**
 * `nowhere`: no place has what the file has. `unknown`: nothing tells places apart, or more than one
 * has it. Throws what `orFail` throws.
 */
export async function findByContent(
  request: ProofRequest,
): Promise<MemoryLayout | 'nowhere' | 'unknown'> {
  const runs = anonymousRuns(request.vmas);
  const found: MemoryLayout[] = [];
  let isOpen = false;
  for (const parts of waysToSplit(request.imageBytes)) {
    const layout = await placeParts(request, parts, runs);
    if (layout === 'unknown') isOpen = true;
    else if (layout !== 'nowhere') found.push(layout);
  }
  const [only] = found;
  if (only !== undefined && found.length === 1) return only;
  return found.length === 0 && !isOpen ? 'nowhere' : 'unknown';
}

/** Whether any stretch of the address space is large enough for a first region. */
export function mayHold(vmas: readonly Vma[], imageBytes: number): boolean {
  const least = Math.min(imageBytes, ...gapStarts);
  return anonymousRuns(vmas).some((run) => lengthOf(run) >= least);
}

function anonymousRuns(vmas: readonly Vma[]): readonly AddressRange[] {
  return writableRuns(vmas.filter((vma) => vma.file === null && !vma.shared));
}

const lengthOf = (run: AddressRange): number => Number(run.end - run.start);

/** A region-to-be: bytes of the image, end exclusive. */
interface Part {
  readonly start: number;
  readonly end: number;
}

function waysToSplit(imageBytes: number): readonly (readonly Part[])[] {
  const ways: (readonly Part[])[] = gapStarts
    .filter((gap) => gap < imageBytes)
    .map((gap) => [
      { start: 0, end: gap },
      { start: gap, end: imageBytes },
    ]);
  // As large as the largest first region, or smaller: it may be one.
  if (ways.length < gapStarts.length) ways.push([{ start: 0, end: imageBytes }]);
  return ways;
}

async function placeParts(
  request: ProofRequest,
  parts: readonly Part[],
  runs: readonly AddressRange[],
): Promise<MemoryLayout | 'nowhere' | 'unknown'> {
  const regions: MemoryRegion[] = [];
  let isOpen = false;
  for (const part of parts) {
    const bases = await basesOf(request, part, runs);
    if (bases !== 'unknown' && bases.length === 0) return 'nowhere';
    const [base] = bases;
    if (bases === 'unknown' || base === undefined || bases.length > 1) isOpen = true;
    else regions.push(regionAt(base as bigint, part));
  }
  if (isOpen) return 'unknown';
  const layout = buildLayout(regions, 'the address map', 'regions');
  if (!layout.ok) return 'nowhere';
  const compared = await sameBytes(request.pid, layout.value, request.path, request.pages);
  // A sample of a file that is mostly zero may tell nothing that the search has not seen.
  return compared === 'different' ? 'nowhere' : layout.value;
}

function regionAt(host: bigint, { start, end }: Part): MemoryRegion {
  const [imageOffset, length] = [bytes(start), bytes(end - start)];
  return { guestAddress: null, hostAddress: hostAddress(host), imageOffset, length };
}

/** Host addresses where a part can begin: what the file has there, is there. */
async function basesOf(
  request: ProofRequest,
  part: Part,
  runs: readonly AddressRange[],
): Promise<readonly bigint[] | 'unknown'> {
  const { path, pages, samplesMax } = request;
  const within = { first: part.start / PAGE_BYTES, end: part.end / PAGE_BYTES };
  const sample = await tellingSample(path, pages, within, samplesMax);
  const step = Math.max(1, Math.floor(sample.length / SEARCH_PAGES));
  const telling = sample.filter((_, at) => at % step === 0).slice(0, SEARCH_PAGES);
  if (telling.length === 0) return 'unknown';
  const bases: bigint[] = [];
  for (const run of runs) {
    if (lengthOf(run) < part.end - part.start) continue;
    let places = await residentPlaces(request, part, run, telling);
    if (places.length > PLACES_MAX) return 'unknown';
    for (const page of telling) places = keepEqual(request.pid, places, part, page);
    bases.push(...places);
  }
  return bases;
}

/** Bases within a run at which all of these pages exist. */
async function residentPlaces(
  { pid, signal }: ProofRequest,
  part: Part,
  run: AddressRange,
  telling: readonly TellingPage[],
): Promise<readonly bigint[]> {
  const around = oneRegion(run.start, lengthOf(run));
  const resident = orFail(await scanPages(pid, around, 'resident', signal));
  const first = part.start / PAGE_BYTES;
  const offsets = telling.map(({ page }) => page - first);
  const slack = (lengthOf(run) - (part.end - part.start)) / PAGE_BYTES;
  const places: bigint[] = [];
  for (let at = 0; at <= slack; at += 1) {
    if (offsets.every((offset) => hasPage(resident, at + offset))) {
      places.push(run.start + BigInt(at * PAGE_BYTES));
    }
  }
  return places;
}

/** Of these bases, those at which the page's most telling bytes are. */
function keepEqual(
  pid: number,
  places: readonly bigint[],
  part: Part,
  { page, bytes: content }: TellingPage,
): readonly bigint[] {
  if (places.length === 0) return places;
  const within = Math.min(firstSet(content), PAGE_BYTES - SEARCH_BYTES);
  const wanted = content.subarray(within, within + SEARCH_BYTES);
  const offset = BigInt(page * PAGE_BYTES - part.start + within);
  const rows = new BigUint64Array(places.length * 3);
  for (const [at, base] of places.entries()) {
    rows.set([base + offset, 0n, BigInt(SEARCH_BYTES)], at * 3);
  }
  const there = readAll(pid, rows, places.length * SEARCH_BYTES);
  return places.filter((_, at) => {
    const start = at * SEARCH_BYTES;
    return start < there.length && there.subarray(start, start + SEARCH_BYTES).equals(wanted);
  });
}

function firstSet(content: Buffer): number {
  const at = content.findIndex((byte) => byte !== 0);
  return Math.max(0, at - (at % 8));
}

/** What could be read: whole where nothing on the way was taken away. */
function readAll(pid: number, rows: BigUint64Array, length: number): Buffer {
  const dest = Buffer.alloc(length);
  const cancel = new Int32Array(new SharedArrayBuffer(4));
  for (let from = 0; ;) {
    const read = readProcess({
      pid,
      rows,
      dest,
      from,
      cancel,
      cancelIndex: 0,
      enomemDeadlineMs: 100,
    });
    if (read.done) return dest;
    if (read.error !== 0 || read.bytesDone === from) return dest.subarray(0, read.bytesDone);
    from = read.bytesDone;
  }
}
