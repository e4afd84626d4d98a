/**
 * The VMM's address space as the kernel tells it (`/proc/pid/maps`): what backs each part of the
 * guest's memory, and where the regions are when the VMM itself does not say.
 */
import { readFile } from 'node:fs/promises';
import type { MemoryLayout } from '../memory.ts';
import { err, ok, systemCode, type Result } from '../result.ts';
import { vmmError, type VmmError } from './errors.ts';
import { isGone } from './process-life.ts';

/** One mapping. */
export interface Vma {
  readonly start: bigint;
  readonly end: bigint;
  readonly writable: boolean;
  readonly shared: boolean;
  /** Offset in the file, bytes. */
  readonly offset: bigint;
  /** `device:inode`; null for anonymous memory. */
  readonly file: string | null;
  readonly path: string;
}

/**
 * What a page that is not there reads: `anonymous` zero, `file` the file's bytes, `faulted`
 * whatever a page-fault handler (userfaultfd) gives it. Of `shared` memory a page may exist without
 * being in this process's page table.
 */
export type Backing = 'anonymous' | 'file' | 'faulted' | 'shared';

/** A part of a region with one backing. Ascending in the image. */
export interface BackedSpan {
  readonly imageOffset: number;
  readonly length: number;
  readonly backing: Backing;
}

export async function readVmas(pid: number): Promise<Result<readonly Vma[], VmmError>> {
  const text = await readProc(pid, 'maps');
  return text.ok ? ok(parseMaps(text.value)) : text;
}

/**
 * Address ranges that are registered for page faults by userfaultfd. Reading them walks page
 * tables.
 */
export async function readFaultedRanges(
  pid: number,
): Promise<Result<readonly AddressRange[], VmmError>> {
  const text = await readProc(pid, 'smaps');
  if (!text.ok) return text;
  const ranges: { start: bigint; end: bigint }[] = [];
  let current: { start: bigint; end: bigint } | undefined;
  for (const line of text.value.split('\n')) {
    const vma = parseLine(line);
    if (vma !== null) current = { start: vma.start, end: vma.end };
    else if (line.startsWith('VmFlags:') && current !== undefined && /\b(um|ui)\b/.test(line)) {
      ranges.push(current);
    }
  }
  return ok(ranges);
}

async function readProc(pid: number, name: string): Promise<Result<string, VmmError>> {
  const path = `/proc/${pid}/${name}`;
  try {
    return ok(await readFile(path, 'utf8'));
  } catch (error) {
    const code = systemCode(error) ?? '';
    if (code === 'ESRCH' || (code === 'ENOENT' && isGone(pid))) {
      return err(vmmError('vm-exited', `the VM exited (pid ${pid})`, { code }));
    }
    // A hidden process has no folder in /proc.
    if (['EACCES', 'EPERM', 'ENOENT'].includes(code)) {
      return err(notPermitted(`read ${path}`, code));
    }
    return err(vmmError('vmm-unreachable', `cannot read ${path} (${code})`, { code }));
  }
}

/** What is missing when the kernel does not let us look into the VMM. */
export function notPermitted(what: string, code: string): VmmError {
  const message =
    `may not ${what} (${code}): the daemon needs the VMM's user id, or both CAP_SYS_PTRACE and ` +
    'CAP_DAC_READ_SEARCH, and kernel.yama.ptrace_scope below 2';
  return vmmError('permission-denied', message, { code });
}

export function parseMaps(text: string): Vma[] {
  const vmas: Vma[] = [];
  for (const line of text.split('\n')) {
    const vma = parseLine(line);
    if (vma !== null) vmas.push(vma);
  }
  return vmas;
}

const lineShape =
  /^([0-9a-f]+)-([0-9a-f]+) ([r-])([w-])[x-]([ps]) ([0-9a-f]+) ([0-9a-f]+:[0-9a-f]+) (\d+)\s*(.*)$/;

function parseLine(line: string): Vma | null {
  const match = lineShape.exec(line);
  if (match === null) return null;
  const [, start, end, , write, share, offset, device, inode, path] = match;
  return {
    start: BigInt(`0x${start ?? '0'}`),
    end: BigInt(`0x${end ?? '0'}`),
    writable: write === 'w',
    shared: share === 's',
    offset: BigInt(`0x${offset ?? '0'}`),
    file: inode === '0' ? null : `${device ?? ''}:${inode ?? ''}`,
    path: path ?? '',
  };
}

/** What backs each part of the layout. Fails where a part of it is not mapped at all. */
export function backingOf(
  layout: MemoryLayout,
  vmas: readonly Vma[],
  faulted: readonly AddressRange[],
): Result<readonly BackedSpan[], VmmError> {
  const spans: BackedSpan[] = [];
  for (const region of layout.regions) {
    const regionEnd = region.hostAddress + BigInt(region.length);
    let at: bigint = region.hostAddress;
    for (const vma of vmas) {
      if (vma.end <= at) continue;
      if (at >= regionEnd || vma.start > at) break;
      const end = vma.end < regionEnd ? vma.end : regionEnd;
      const imageOffset = region.imageOffset + Number(at - region.hostAddress);
      pushSpan(spans, imageOffset, Number(end - at), backing(vma, faulted));
      at = end;
    }
    if (at < regionEnd) {
      const message =
        `the memory region at image offset 0x${region.imageOffset.toString(16)} is not mapped ` +
        `in the VMM at host address 0x${at.toString(16)}`;
      return err(vmmError('layout-changed', message));
    }
  }
  return ok(spans);
}

function backing(vma: Vma, faulted: readonly AddressRange[]): Backing {
  if (faulted.some((range) => range.start < vma.end && vma.start < range.end)) return 'faulted';
  if (vma.shared) return 'shared';
  return vma.file === null ? 'anonymous' : 'file';
}

function pushSpan(spans: BackedSpan[], imageOffset: number, length: number, kind: Backing): void {
  const last = spans.at(-1);
  if (last?.backing === kind && last.imageOffset + last.length === imageOffset) {
    spans[spans.length - 1] = { ...last, length: last.length + length };
  } else spans.push({ imageOffset, length, backing: kind });
}

/** A stretch of the VMM's address space. */
export interface AddressRange {
  readonly start: bigint;
  readonly end: bigint;
}

/** Stretches of writable mappings without a hole between them. */
export function writableRuns(vmas: readonly Vma[]): readonly AddressRange[] {
  const runs: { start: bigint; end: bigint }[] = [];
  for (const vma of vmas) {
    if (!vma.writable) continue;
    const last = runs.at(-1);
    if (last?.end === vma.start) last.end = vma.end;
    else runs.push({ start: vma.start, end: vma.end });
  }
  return runs;
}
