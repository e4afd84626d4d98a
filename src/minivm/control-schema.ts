import { z } from 'zod';
import { PAGE_BYTES } from '../units.ts';

/**
 * Bodies of the small VM's own control endpoints (`/minivm/…`), shared by the VM and its client.
 * Pages are indexes into the memory image.
 */
const page = z.int().min(0);
const pageCount = z.int().min(1);

const guestAddress = z
  .union([z.int().min(0), z.string().regex(/^(0x[0-9a-fA-F]{1,16}|\d{1,20})$/)])
  .transform((value) => BigInt(value));

export const regionSpec = z.strictObject({ guestAddress, bytes: z.int().min(PAGE_BYTES) });
export const regionList = z.strictObject({ regions: z.array(regionSpec).min(1).max(64) });

/** Which pages: a list, a range, or `count` distinct ones drawn from a range by a seed. */
export const pageChoice = z.union([
  z.strictObject({ pages: z.array(page).min(1).max(4_194_304) }),
  z.strictObject({ firstPage: page, pageCount }),
  z.strictObject({
    seed: z.int().min(0).max(0xffffffff),
    count: pageCount.max(4_194_304),
    firstPage: page.default(0),
    /** Size of the range to draw from; the rest of the image by default. */
    spanPages: pageCount.optional(),
  }),
]);
export type PageChoice = z.input<typeof pageChoice>;

export const programBody = z.strictObject({
  pages: pageChoice,
  /** `random`: different in every page, pass and seed. `constant`: `value` in every word. */
  fill: z.enum(['random', 'zero', 'constant', 'read']).default('random'),
  /** Seed of `random`, or the word of `constant`. */
  value: z.int().min(0).max(0xffffffff).default(1),
  /** 32-bit words written at the start of each page; 1024 is the whole page. */
  words: z.int().min(2).max(1024).default(1024),
  loop: z.boolean().default(false),
  /** 0 = as fast as the guest can. */
  pagesPerSecond: z.int().min(0).max(10_000_000).default(0),
});
export type ProgramBody = z.input<typeof programBody>;

export const deviceWriteBody = z.strictObject({
  pages: pageChoice,
  value: z.int().min(0).max(0xffffffff).default(1),
});
export type DeviceWriteBody = z.input<typeof deviceWriteBody>;

export const removalBody = z.strictObject({
  firstPage: page,
  pageCount,
  /** Also set the pages in the VMM's dirty bitmap. Firecracker's balloon does not. */
  markDirty: z.boolean().default(false),
});
export type RemovalBody = z.input<typeof removalBody>;

export const unreadableBody = z.strictObject({ page, unreadable: z.boolean().default(true) });

/** What a request is, for faults and for the request log. */
export const operations = [
  'describe',
  'configure',
  'start',
  'pause',
  'resume',
  'snapshot-create',
  'snapshot-load',
  'dirty',
  'mappings',
  'epoch',
  'other',
] as const;
export type Operation = (typeof operations)[number];

/** What an answer about dirty pages may be falsified to, when the request is `dirty` or `mappings`. */
export const lies = [
  /** The bitmap without its last word. */
  'bitmap-short',
  /** The bitmap and a word more. */
  'bitmap-long',
  /** Every bit of the bitmap's last word set, those past the region's end too. */
  'bitmap-tail',
  /** Pages of a size that no machine has. */
  'page-size',
  /** Device writes left out. */
  'no-device-writes',
] as const;

/** What its owner does to the VM meanwhile; the guest then writes `writes`, and has done so. */
export const ownersActs = ['owner-resumes', 'owner-interrupts'] as const;

export const faultRule = z.strictObject({
  /** `any` = every request of the VMM's API; `now` = at once, without waiting for a request. */
  on: z.enum([...operations, 'any', 'now']),
  /** `owner-interrupts`: resumes, and pauses again. */
  action: z.enum(['die', 'hang', 'refuse', 'delay', 'garbage', ...lies, ...ownersActs]),
  /** Before the operation; once it is done but not answered; or after its answer (only `die`). */
  when: z.enum(['before', 'done', 'answered']).default('before'),
  /** Matching requests to let pass first: `on: 'any', skip: 4` strikes at the fifth request. */
  skip: z.int().min(0).default(0),
  /** How many requests to strike; 0 = all. */
  times: z.int().min(0).default(1),
  /** Wait this long before acting. */
  afterMs: z.int().min(0).max(600_000).default(0),
  message: z.string().default('Refused by a scripted fault'),
  /** For `owner-…`: pages that the guest fills anew. */
  writes: z
    .strictObject({ firstPage: page, pageCount, value: z.int().min(0).max(0xffffffff).default(1) })
    .default({ firstPage: 0, pageCount: 1, value: 1 }),
});
export type FaultRule = z.infer<typeof faultRule>;
export type FaultBody = z.input<typeof faultRule>;

export interface LoggedRequest {
  readonly method: string;
  readonly path: string;
  readonly operation: Operation;
  /** 0 = no answer was given. */
  readonly status: number;
}

export interface MiniVmInfo {
  readonly pid: number;
  readonly backend: 'kvm' | 'thread';
  readonly backendReason: string;
  readonly dialect: string;
  readonly state: string;
  readonly tracking: boolean;
  readonly dirtyEpochs: boolean;
  readonly imageBytes: number;
  /** Addresses as decimal text: they are exact. */
  readonly regions: readonly {
    readonly guestAddress: string;
    readonly hostAddress: string;
    readonly imageOffset: number;
    readonly bytes: number;
  }[];
}
