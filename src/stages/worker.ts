/** What runs on a worker thread. Its exports are the operations of `operations.ts`, by name. */
import { workerData } from 'piscina';
import { readFileRows, readProcess, zeroPages } from '../native/guest.ts';
import { compressBatch, type CompressedBatch } from '../layer/compress.ts';
import { ZEROED_ROW } from '../layer/format.ts';
import { compareWithStack } from '../layer/shared-stack.ts';
import type { WorkerSetup } from '../pipeline/worker-setup.ts';
import { PAGE_BYTES } from '../units.ts';
import type { CompactOutcome, CompactTask, ReadOutcome, ReadTask } from './operations.ts';

const setup = workerData as WorkerSetup;
const cancel = new Int32Array(setup.cancelWords);
const pageBytes = BigInt(PAGE_BYTES);

/** Fills a slab from the VMM's memory, or from the memory file it wrote. */
export function read(task: ReadTask): ReadOutcome {
  const dest = new Uint8Array(setup.arena, task.slabOffset, task.bytes);
  const common = { rows: task.rows, dest, cancel, cancelIndex: task.cancelSlot };
  const deadline = { enomemDeadlineMs: task.noMemoryDeadlineMs };
  const { source } = task;
  let from = 0;
  let syscalls = 0;
  for (;;) {
    const step =
      source.kind === 'process'
        ? readProcess({ pid: source.pid, from, ...common, ...deadline })
        : readFileRows({ fd: source.fd, from, ...common, ...deadline });
    from = step.bytesDone;
    syscalls += step.syscalls;
    if (step.done || step.cancelled || step.error !== 0) {
      return { done: step.done, error: step.error, address: step.address, syscalls };
    }
  }
}

/** Says which of a slab's pages must be stored, as what; compresses them where asked. */
export function compact(task: CompactTask): CompactOutcome {
  const slab = new Uint8Array(setup.arena, task.slabOffset, task.bytes);
  const zero = zeroPages(slab);
  let equal: Uint8Array | null = null;
  if (task.parent !== null) {
    const compared = compareWithStack({ stack: task.parent, slab, rows: task.rows });
    if (!compared.ok) {
      const { message } = compared.error;
      const failure = { kind: 'parent-unreadable', message };
      return {
        rows: new BigUint64Array(0),
        compressed: null,
        zeroPages: 0,
        equalPages: 0,
        failure,
      };
    }
    equal = compared.value;
  }
  const kept = keptRows(task, zero, equal);
  return { ...kept, compressed: compressRows(task, slab, kept.rows), failure: null };
}

const bit = (bits: Uint8Array, index: number): boolean =>
  (((bits[index >> 3] ?? 0) >> (index & 7)) & 1) === 1;

/** Runs of pages of one kind, as rows; zero pages and equal pages as the task says. */
function keptRows(
  task: CompactTask,
  zero: Uint8Array,
  equal: Uint8Array | null,
): { rows: BigUint64Array; zeroPages: number; equalPages: number } {
  const out: bigint[] = [];
  let zeroCount = 0;
  let equalCount = 0;
  let page = 0;
  for (let row = 0; row < task.rows.length; row += 3) {
    const image = task.rows[row] ?? 0n;
    const slabAt = task.rows[row + 2] ?? 0n;
    const pages = Number((task.rows[row + 1] ?? 0n) / pageBytes);
    for (let from = 0; from < pages;) {
      const kind = kindOf(page + from);
      let to = from + 1;
      while (to < pages && kindOf(page + to) === kind) to++;
      if (kind === 'zero') zeroCount += to - from;
      if (kind === 'equal') equalCount += to - from;
      if (kind === 'data' || (kind === 'zero' && task.keepZeros)) {
        const at = BigInt(from) * pageBytes;
        const moved = kind === 'zero' ? ZEROED_ROW : slabAt + at;
        out.push(image + at, BigInt(to - from) * pageBytes, moved);
      }
      from = to;
    }
    page += pages;
  }
  return { rows: BigUint64Array.from(out), zeroPages: zeroCount, equalPages: equalCount };

  function kindOf(index: number): 'equal' | 'zero' | 'data' {
    if (equal !== null && bit(equal, index)) return 'equal';
    return bit(zero, index) ? 'zero' : 'data';
  }
}

function compressRows(
  task: CompactTask,
  slab: Uint8Array,
  rows: BigUint64Array,
): CompressedBatch | null {
  if (task.compress === null || setup.compressedArena === null) return null;
  const { algorithm, blockBytes, slabOffset } = task.compress;
  const out = new Uint8Array(setup.compressedArena, slabOffset, setup.compressedSlabBytes);
  const made = compressBatch({ slab, rows, out, algorithm, blockBytes });
  if (made === null) throw new Error('a slab for compressed blocks is too small for its batch');
  return made;
}
