/**
 * Reads a VM's memory in ascending image order, without gap or overlap within a set. In: range batches.
 * Out: slabs of bytes. Source: process_vm_readv(2), or the memory file that the VMM wrote. Fails:
 * `vm-exited`, `vm-replaced`, `vm-ran`, `unreadable-page` naming the address, `permission-denied`,
 * `read-unsupported`, `read-failed`; never retries.
 */
import { constants } from 'node:os';
import { mapOrdered } from '../pipeline/map-ordered.ts';
import type { PoolClient } from '../pipeline/pool.ts';
import type { SlabHolder } from '../pipeline/slabs.ts';
import type { Stage } from '../pipeline/stage.ts';
import { Failure } from '../result.ts';
import type { PageBatch, RangeBatch } from './items.ts';
import { readOperation, type ReadOutcome } from './operations.ts';

export interface ReadConfig {
  /** Batches in flight: tasks of this capture in the worker pool at a time. */
  readonly inFlightMax: number;
  /** How long a read that fails for want of kernel memory is tried again, milliseconds. */
  readonly noMemoryDeadlineMs: number;
}

export interface ReadDeps {
  readonly pool: PoolClient;
  readonly slabs: SlabHolder;
  readonly cancelSlot: number;
  /** Open for reading, when the batches' source is a file. */
  readonly memoryFileFd: () => number;
  /**
   * Throws unless the process is the one that was attached, alive. Called before the first byte and
   * after the last.
   */
  readonly checkIdentity: () => void;
  /** Nothing more is read of the VM. Throws `vm-ran` where the guest ran since its state was saved. */
  readonly stoodStill: (signal: AbortSignal) => Promise<void>;
  /** Everything is in slabs or staging: the VM may run. */
  readonly copied: () => void;
}

export function readPages(config: ReadConfig, deps: ReadDeps): Stage<RangeBatch, PageBatch> {
  return {
    name: 'read',
    async *run(input, { meter, signal, failed }) {
      meter.start();
      deps.checkIdentity();
      yield* mapOrdered(input, { inFlightMax: config.inFlightMax, signal, failed }, (batch) =>
        batch.kind === 'zeros'
          ? Promise.resolve(batch)
          : readBatch(batch, config, deps, (work) => meter.item(batch.bytes, work)),
      );
      deps.checkIdentity();
      await deps.stoodStill(signal);
      meter.end();
      deps.copied();
    },
  };
}

async function readBatch(
  batch: RangeBatch & { readonly kind: 'ranges' },
  config: ReadConfig,
  deps: ReadDeps,
  timed: (work: () => Promise<ReadOutcome>) => Promise<ReadOutcome>,
): Promise<PageBatch> {
  const slab = await deps.slabs.acquire();
  const outcome = await timed(() =>
    deps.pool.run(readOperation, {
      source:
        batch.source.kind === 'process'
          ? { kind: 'process', pid: batch.source.pid }
          : { kind: 'file', fd: deps.memoryFileFd() },
      rows: batch.rows,
      slabOffset: slab.offset,
      bytes: batch.bytes,
      cancelSlot: deps.cancelSlot,
      noMemoryDeadlineMs: config.noMemoryDeadlineMs,
    }),
  );
  if (outcome.error !== 0) throw readFailure(outcome, batch);
  if (!outcome.done) throw new Failure({ kind: 'cancelled', message: 'the capture was cancelled' });
  const { bytes, round, unnamed } = batch;
  return { kind: 'pages', slab, rows: packedRows(batch.rows), bytes, round, unnamed };
}

/** The rows again, as image offset, length and offset in the slab. */
function packedRows(rows: BigUint64Array): BigUint64Array {
  const packed = new BigUint64Array(rows.length);
  let at = 0n;
  for (let row = 0; row < rows.length; row += 3) {
    const length = rows[row + 2] ?? 0n;
    packed[row] = rows[row + 1] ?? 0n;
    packed[row + 1] = length;
    packed[row + 2] = at;
    at += length;
  }
  return packed;
}

const { errno } = constants;

function readFailure(
  outcome: ReadOutcome,
  batch: RangeBatch & { readonly kind: 'ranges' },
): Failure {
  const where =
    batch.source.kind === 'process'
      ? `address 0x${outcome.address.toString(16)} of process ${batch.source.pid}`
      : `offset ${outcome.address} of the memory file ${batch.source.path}`;
  const name = Object.entries(errno).find(([, value]) => value === outcome.error)?.[0];
  const code = name ?? `errno ${outcome.error}`;
  switch (outcome.error) {
    case errno.ESRCH:
      return new Failure({
        kind: 'vm-exited',
        message: `the VMM exited while it was read (${where})`,
      });
    case errno.EFAULT:
      return new Failure({ kind: 'unreadable-page', message: `no page can be read at ${where}` });
    case errno.EPERM:
    case errno.EACCES:
      return new Failure({
        kind: 'permission-denied',
        message: `reading ${where} is not permitted: the daemon needs CAP_SYS_PTRACE or the VMM's uid`,
      });
    case errno.ENOSYS:
      return new Failure({
        kind: 'read-unsupported',
        message: 'this kernel or its seccomp filter offers no process_vm_readv',
      });
    default:
      return new Failure({ kind: 'read-failed', message: `reading ${where} failed with ${code}` });
  }
}
