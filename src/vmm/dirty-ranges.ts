/**
 * The answer to `GET /vm/dirty-memory-ranges` (dialect `aenv`): `{page_size, memory_size, ranges:
 * [{base_host_virt_addr, image_offset, length}]}`, each range within one memory region. Sizes in
 * bytes.
 */
import type { PageBitmap } from '../memory.ts';
import { bitmapCount } from '../native/guest.ts';
import { PAGE_BYTES, bytes, pagesExact, type Bytes } from '../units.ts';
import { emptyBitmap, setPages } from './bitmap.ts';
import { JsonScanner } from './json-scan.ts';
import { IMAGE_BYTES_MAX, isPageSize } from './layout.ts';

/**
 * A run of the image that is mapped at one distance from its offset: part of one memory region. The
 * answer names written pages only, so where a region begins and ends is not in it.
 */
export interface MappedSpan {
  readonly imageStart: Bytes;
  readonly imageEnd: Bytes;
  /** Host address minus image offset, modulo 2^64. */
  readonly delta: bigint;
}

export interface DirtyRanges {
  readonly imageBytes: Bytes;
  readonly dirty: PageBitmap;
  /** Ascending in the image, not overlapping there nor in the VMM's address space. */
  readonly spans: readonly MappedSpan[];
}

/** @throws Failure<VmmError> `vmm-bad-answer` naming the field */
export function decodeDirtyRanges(text: Uint8Array, what: string): DirtyRanges {
  const scan: JsonScanner = new JsonScanner(text, what);
  let pageBytes: number | undefined;
  let memoryBytes: number | undefined;
  let rangesAt: number | undefined;
  scan.object('', (key) => {
    if (key === 'page_size') pageBytes = scan.count(key);
    else if (key === 'memory_size') memoryBytes = scan.count(key);
    else {
      if (key === 'ranges') rangesAt = scan.position;
      scan.skip(key);
    }
  });
  scan.end();
  if (pageBytes === undefined) scan.fail('page_size', 'is missing');
  if (memoryBytes === undefined) scan.fail('memory_size', 'is missing');
  if (rangesAt === undefined) scan.fail('ranges', 'is missing');
  checkSizes(scan, pageBytes, memoryBytes);
  scan.seek(rangesAt);
  return new RangeCollector(scan, pageBytes, memoryBytes).collect();
}

function checkSizes(scan: JsonScanner, pageBytes: number, memoryBytes: number): void {
  if (!isPageSize(pageBytes)) {
    scan.fail('page_size', `of ${pageBytes} bytes is not supported`);
  }
  if (memoryBytes === 0) scan.fail('memory_size', 'is 0: the VM has no memory');
  if (memoryBytes % pageBytes !== 0) scan.fail('memory_size', `${memoryBytes} is not whole pages`);
  if (memoryBytes > IMAGE_BYTES_MAX) {
    scan.fail('memory_size', `${memoryBytes} is beyond the limit of ${IMAGE_BYTES_MAX}`);
  }
}

/** One span while it grows; the delta in halves, since bigint arithmetic on every range is slow. */
interface GrowingSpan {
  deltaLow: number;
  deltaHigh: number;
  start: number;
  end: number;
}

class RangeCollector {
  readonly #scan: JsonScanner;
  readonly #pageBytes: number;
  readonly #memoryBytes: number;
  readonly #dirty: PageBitmap;
  readonly #spans: GrowingSpan[] = [];
  #current: GrowingSpan | undefined;
  #namedBytes = 0;

  constructor(scan: JsonScanner, pageBytes: number, memoryBytes: number) {
    this.#scan = scan;
    this.#pageBytes = pageBytes;
    this.#memoryBytes = memoryBytes;
    this.#dirty = emptyBitmap(pagesExact(bytes(memoryBytes)));
  }

  collect(): DirtyRanges {
    this.#scan.array('ranges', (index) => this.#range(index));
    const pages = bitmapCount(this.#dirty.bits);
    if (pages * PAGE_BYTES !== this.#namedBytes) {
      const twice = this.#namedBytes / PAGE_BYTES - pages;
      this.#scan.fail('ranges', `overlap: ${twice} pages are named twice`);
    }
    return {
      imageBytes: bytes(this.#memoryBytes),
      dirty: this.#dirty,
      spans: checkedSpans(this.#scan, this.#spans),
    };
  }

  #range(index: number): void {
    const scan = this.#scan;
    const name = (field: string): string => `ranges[${index}].${field}`;
    let hostLow = -1;
    let hostHigh = 0;
    let offset = -1;
    let length = -1;
    scan.object(`ranges[${index}]`, (key) => {
      if (key === 'base_host_virt_addr') {
        scan.u64(() => name(key));
        hostLow = scan.low;
        hostHigh = scan.high;
      } else if (key === 'image_offset') offset = scan.count(() => name(key));
      else if (key === 'length') length = scan.count(() => name(key));
      else scan.skip(name(key));
    });
    if (hostLow < 0) scan.fail(name('base_host_virt_addr'), 'is missing');
    if (offset < 0) scan.fail(name('image_offset'), 'is missing');
    if (length < 0) scan.fail(name('length'), 'is missing');
    const { low, high } = this.#check(index, hostLow, hostHigh, offset, length);
    this.#grow(low, high, offset, offset + length);
    setPages(this.#dirty.bits, offset / PAGE_BYTES, length / PAGE_BYTES);
    this.#namedBytes += length;
  }

  /** Checks one range and gives its delta. */
  #check(
    index: number,
    hostLow: number,
    hostHigh: number,
    offset: number,
    length: number,
  ): { low: number; high: number } {
    const scan = this.#scan;
    const name = `ranges[${index}]`;
    const page = this.#pageBytes;
    if (length === 0) scan.fail(`${name}.length`, 'is 0');
    if (length % page !== 0) scan.fail(`${name}.length`, `${length} is not whole pages`);
    if (offset % page !== 0) scan.fail(`${name}.image_offset`, `${offset} is not a whole page`);
    // The page size divides 2^32, so the low half alone shows the alignment.
    if (hostLow % page !== 0) scan.fail(`${name}.base_host_virt_addr`, 'is not a whole page');
    if (offset + length > this.#memoryBytes) {
      scan.fail(name, `ends at ${offset + length}, past memory_size ${this.#memoryBytes}`);
    }
    if (hostHigh * 2 ** 32 + hostLow + length > 2 ** 64) {
      scan.fail(name, 'runs past the end of the address space');
    }
    const offsetLow = offset % 2 ** 32;
    const offsetHigh = Math.floor(offset / 2 ** 32);
    const borrow = hostLow < offsetLow ? 1 : 0;
    return {
      low: (hostLow - offsetLow) >>> 0,
      high: (hostHigh - offsetHigh - borrow) >>> 0,
    };
  }

  #grow(deltaLow: number, deltaHigh: number, start: number, end: number): void {
    let span = this.#current;
    if (span?.deltaLow !== deltaLow || span.deltaHigh !== deltaHigh) {
      span = this.#spans.find((s) => s.deltaLow === deltaLow && s.deltaHigh === deltaHigh);
      if (span === undefined) {
        if (this.#spans.length >= 4096) this.#scan.fail('ranges', 'lie in too many memory regions');
        span = { deltaLow, deltaHigh, start, end };
        this.#spans.push(span);
      }
      this.#current = span;
    }
    span.start = Math.min(span.start, start);
    span.end = Math.max(span.end, end);
  }
}

/**
 * Spans of different regions must not interleave: then their host addresses contradict each other.
 */
function checkedSpans(scan: JsonScanner, growing: readonly GrowingSpan[]): MappedSpan[] {
  const spans = growing
    .map((span) => ({
      imageStart: bytes(span.start),
      imageEnd: bytes(span.end),
      delta: (BigInt(span.deltaHigh) << 32n) | BigInt(span.deltaLow),
    }))
    .sort((a, b) => a.imageStart - b.imageStart);
  for (let i = 1; i < spans.length; i += 1) {
    const before = spans[i - 1];
    const span = spans[i];
    if (before === undefined || span === undefined) continue;
    if (before.imageEnd > span.imageStart) {
      const at = `0x${span.imageStart.toString(16)}`;
      scan.fail('ranges', `name contradicting host addresses around image offset ${at}`);
    }
  }
  const byHost = spans.map(hostSpan).sort((a, b) => (a.start < b.start ? -1 : 1));
  for (let i = 1; i < byHost.length; i += 1) {
    const before = byHost[i - 1];
    const span = byHost[i];
    if (before !== undefined && span !== undefined && before.end > span.start) {
      const at = `0x${span.start.toString(16)}`;
      scan.fail('ranges', `map two parts of the image to host address ${at}`);
    }
  }
  return spans;
}

/** Where a span is in the VMM's address space. */
export function hostSpan(span: MappedSpan): { readonly start: bigint; readonly end: bigint } {
  const start = BigInt.asUintN(64, span.delta + BigInt(span.imageStart));
  return { start, end: start + BigInt(span.imageEnd - span.imageStart) };
}
