/** `[pipeline]`: the shared budget, and concurrency, batch size and queue bound of every stage. */
import { availableParallelism } from 'node:os';
import { z } from 'zod';
import { PAGE_BYTES } from '../units.ts';
import { byteSize, duration, valueKinds } from './values.ts';

const wholePages = (size: number): boolean => size % PAGE_BYTES === 0;
const WORKERS_MAX = 64;
const WORKERS_AUTO_MAX = 8;

const count = (max: number) => z.int().min(1).max(max);
const one = (why: string) => z.literal(1).prefault(1).describe(why);

const captures = 'Captures, of all VMs, that may be in this stage at once.';
const single = 'Fixed: one request is one item.';
const batch = 'Fixed: one batch of `coalesce` is one item.';

const pause = z
  .strictObject({
    concurrency: count(1024).prefault(8).describe(`${captures} Each VM is paused by one at most.`),
    batch_items: one(single),
    queue_max: count(4096).prefault(64).describe('Captures that may wait for their turn to pause.'),
  })
  .describe('Freezing the VM.');

const dirtyBitmap = z
  .strictObject({
    concurrency: count(1024).prefault(8).describe(captures),
    batch_items: one(single),
    queue_max: count(4096).prefault(64).describe('Captures that may wait for this stage.'),
  })
  .describe('Fetching the dirty set and the VM state.');

const coalesce = z
  .strictObject({
    concurrency: one('Fixed: one scan per capture, in page order.'),
    batch_bytes: byteSize({ min: '64KiB', max: '64MiB' })
      .refine(wholePages, 'must be whole pages of 4 KiB')
      .prefault('4MiB')
      .describe('Guest memory per batch, and so the bytes of a slab that one read fills.'),
    batch_ranges: count(65_536)
      .prefault(1024)
      .describe('Ranges per batch at most; the kernel takes 1024 per call.'),
    join_gap_pages: z
      .int()
      .min(0)
      .max(1024)
      .prefault(0)
      .describe(
        'Clean pages between two dirty ones that are read along, to make fewer ranges. Only where ' +
          'pages are read from the process, and none is known to have been removed.',
      ),
    queue_max: count(1024).prefault(4).describe('Batches of ranges that may wait for a reader.'),
  })
  .describe('Turning the dirty set into ranges.');

const read = z
  .strictObject({
    concurrency: count(WORKERS_MAX)
      .prefault(8)
      .describe('Batches of one capture that workers read, or have waiting, at once.'),
    batch_iovecs: count(1024).prefault(1024).describe('Ranges per process_vm_readv call.'),
    enomem_deadline: duration({ max: '1m' })
      .prefault('2s')
      .describe('How long a read that fails for lack of memory is retried.'),
    queue_max: count(1024).prefault(4).describe('Filled slabs that may wait for compaction.'),
  })
  .describe('Copying guest memory into slabs.');

const compact = z
  .strictObject({
    concurrency: count(WORKERS_MAX)
      .prefault(2)
      .describe('Slabs of one capture that workers compact at once.'),
    batch_items: one(batch),
    queue_max: count(1024)
      .prefault(4)
      .describe('Compacted slabs that may wait for the layer file.'),
  })
  .describe('Finding zero pages, dropping pages that the parent has, compressing.');

const commit = z
  .strictObject({
    concurrency: count(1024).prefault(8).describe(`${captures} Appends of one are in order.`),
    batch_items: one(batch),
    queue_max: count(1024).prefault(4).describe('Batches that may wait to be appended.'),
  })
  .describe('Writing and sealing the layer.');

const publish = z
  .strictObject({
    concurrency: count(1024).prefault(4).describe(captures),
    batch_items: one(single),
    queue_max: count(65_536).prefault(1024).describe('Committed captures that may wait.'),
    retry_min: duration({ min: '10ms' }).prefault('200ms').describe('First delay after a failure.'),
    retry_max: duration({ min: '100ms' })
      .prefault('30s')
      .describe('Longest delay between retries.'),
  })
  .describe('Artifacts to the store, and the snapshot to the catalog.');

const resume = z
  .strictObject({
    concurrency: count(1024).prefault(64).describe(captures),
    batch_items: one(single),
    queue_max: count(4096).prefault(1024).describe('VMs that may wait to be resumed.'),
  })
  .describe('Letting the VM run again.');

/** Bound of `pipeline.precopy.rounds`, and of what a request may ask for instead. */
export const precopyRoundsMax = 16;

const precopy = z
  .strictObject({
    rounds: z
      .int()
      .min(0)
      .max(precopyRoundsMax)
      .prefault(0)
      .describe(
        'Rounds of copying while the VM still runs, at most; fewer where they do not help. 0: off. ' +
          'Only for VMMs with dirty epochs of their own in mode `dirty`; without effect elsewhere. ' +
          'A request may ask for another number.',
      ),
    bytes_max: byteSize({ min: '1MiB', max: '1TiB' })
      .prefault('4GiB')
      .describe(
        'Guest memory copied before the pause, of one capture. A round that would pass it is left ' +
          'to the pause. What is copied again later stays in the layer file as dead bytes.',
      ),
  })
  .describe('Copying before the pause.');

function workerCount() {
  const schema = z
    .int()
    .min(0)
    .max(WORKERS_MAX)
    .transform((n) =>
      n === 0 ? Math.min(WORKERS_AUTO_MAX, Math.max(2, availableParallelism())) : n,
    );
  valueKinds.add(schema, { written: `integer, 0 to ${WORKERS_MAX}` });
  return schema;
}

export const pipelineSection = z
  .strictObject({
    workers: workerCount()
      .prefault(0)
      .describe('Threads that read and compact, for all captures. 0: one per CPU, 2 to 8.'),
    slab_budget: byteSize({ min: '1MiB', max: '64GiB' })
      .prefault('256MiB')
      .describe('Memory for guest bytes in flight, of all captures; taken and touched at start.'),
    slab_bytes: byteSize({ min: '64KiB', max: '64MiB' })
      .refine(wholePages, 'must be whole pages of 4 KiB')
      .prefault('4MiB')
      .describe('Size of one slab; holds one batch of `coalesce`.'),
    pause: pause.prefault({}),
    dirty_bitmap: dirtyBitmap.prefault({}),
    coalesce: coalesce.prefault({}),
    read: read.prefault({}),
    compact: compact.prefault({}),
    commit: commit.prefault({}),
    publish: publish.prefault({}),
    resume: resume.prefault({}),
    precopy: precopy.prefault({}),
  })
  .refine((p) => p.coalesce.batch_bytes <= p.slab_bytes, {
    path: ['coalesce', 'batch_bytes'],
    error: 'must not exceed `pipeline.slab_bytes`',
  })
  .refine((p) => p.slab_budget >= 4 * p.slab_bytes, {
    path: ['slab_budget'],
    error: 'must be at least four slabs (`slab_bytes`)',
  })
  .refine((p) => p.publish.retry_min <= p.publish.retry_max, {
    path: ['publish', 'retry_min'],
    error: 'must not exceed `retry_max`',
  })
  .describe('Memory, threads and queues that all captures share.');
