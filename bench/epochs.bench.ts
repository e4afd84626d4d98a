/**
 * Long chains on a real daemon and a real small VM: a hot set is rewritten and captured again and
 * again, and compaction keeps the chain short meanwhile. Budgets: DESIGN §11.
 */
import type { CaptureResult } from '../src/capture/types.ts';
import { percentile } from './bare.ts';
import { BenchDaemon } from './daemon.ts';
import { compressions, trackingCost, trackingModes, type ModeSizes } from './epoch-modes.ts';
import { precopyRounds } from './precopy.ts';
import { mib, ms, restoreMs, resultOf, type Print } from './figures.ts';
import { plotEpochs, type EpochPoint } from './plot.ts';

export interface Sizes extends ModeSizes {
  /** Counts of captures at which the state of things is printed; ascending. */
  readonly captures: readonly number[];
  /** Pages rewritten before each capture, drawn anew from `hotSpan`. */
  readonly hotPages: number;
  readonly hotSpan: number;
  readonly maxChain: number;
  /** Part `precopy`: written before each capture, and the part that is rewritten all the time. */
  readonly writtenMib: number;
  readonly hotMib: number;
}

export const sizes = {
  smoke: {
    captures: [3, 8],
    hotPages: 64,
    hotSpan: 512,
    maxChain: 4,
    rounds: 1,
    touchedMib: 8,
    changedMib: 1,
    compressedMib: 4,
    compressions: ['none', 'zstd'],
    trackingMs: 100,
    modeCount: 3,
    writtenMib: 8,
    hotMib: 1,
  },
  full: {
    captures: [10, 100, 1000],
    hotPages: 512,
    hotSpan: 4096,
    maxChain: 32,
    rounds: 7,
    touchedMib: 128,
    changedMib: 16,
    compressedMib: 64,
    compressions: ['none', 'lz4', 'zstd'],
    trackingMs: 4000,
    modeCount: 5,
    writtenMib: 64,
    hotMib: 1,
  },
} as const satisfies Record<string, Sizes>;

export const parts = ['chain', 'modes', 'compression', 'tracking', 'precopy'] as const;
export type Part = (typeof parts)[number];

/** Pages below hold the guest's own program and mailbox. */
const firstPage = 1024;

export interface EpochOptions {
  /** Default: all. */
  readonly part?: Part | undefined;
  /** Where the plot of part `chain` goes; none without it. */
  readonly plotFile?: string | undefined;
}

export async function epochsBench(
  size: Sizes,
  print: Print,
  { part, plotFile }: EpochOptions = {},
): Promise<void> {
  const does = (name: Part): boolean => part === undefined || part === name;
  if (does('chain')) await chain(size, print, plotFile);
  if (does('modes')) await trackingModes(size, print);
  if (does('compression')) await compressions(size, print);
  if (does('tracking')) await trackingCost(size, print);
  if (does('precopy')) await precopyRounds(size, print);
}

/** What has come together since the first capture. */
interface Tally {
  readonly frozen: number[];
  readonly points: EpochPoint[];
  capturedBytes: number;
  layerBytes: number;
  depthMax: number;
}

async function chain(size: Sizes, print: Print, plotFile: string | undefined): Promise<void> {
  const { maxChain, hotPages, hotSpan } = size;
  await using daemon = await BenchDaemon.start({ lineage: { max_chain: maxChain } });
  const memoryMib = Math.ceil((firstPage + hotSpan) / 256) + 8;
  await using vm = await daemon.vm({ dialect: 'e2b', memoryMib });
  await vm.run({ pages: { firstPage, pageCount: hotSpan }, value: 1 });
  const { vmId } = await daemon.attach(vm);
  print(
    `chain: ${mib(hotPages * 4096)} drawn from a hot set of ${mib(hotSpan * 4096)} are rewritten ` +
      `before each capture; e2b, dirty, resume_after = copy, max_chain ${maxChain}, ` +
      `guest: ${vm.backend}`,
  );
  const tally: Tally = { frozen: [], points: [], capturedBytes: 0, layerBytes: 0, depthMax: 0 };
  const threshold = Math.max(2, maxChain - Math.min(4, Math.floor(maxChain / 4)));
  const last = size.captures.at(-1) ?? 0;
  for (let epoch = 1; epoch <= last; epoch++) {
    await vm.run({
      pages: { seed: epoch, count: hotPages, firstPage, spanPages: hotSpan },
      value: epoch,
    });
    const result = resultOf(await daemon.capture(vmId, { resumeAfter: 'copy' }));
    await count(daemon, tally, result, epoch);
    if (epoch === threshold - 1) {
      const before = await restoreMs(daemon, result.snapshotId);
      print(`restore before the first compaction: depth ${result.chainDepth}, ${ms(before)}`);
    }
    if (epoch === threshold) {
      await compacted(daemon, vmId, threshold);
      const next = resultOf(await daemon.capture(vmId, { resumeAfter: 'copy' }));
      const after = await restoreMs(daemon, next.snapshotId);
      print(`restore after it: depth ${next.chainDepth}, ${ms(after)}`);
    }
    if (size.captures.some((each) => each === epoch)) {
      print(await line(daemon, tally, result, epoch));
    }
  }
  if (plotFile !== undefined) plotEpochs(plotFile, tally.points, maxChain);
}

async function count(
  daemon: BenchDaemon,
  tally: Tally,
  result: CaptureResult,
  epoch: number,
): Promise<void> {
  tally.frozen.push(result.frozenMs);
  tally.capturedBytes += result.dataBytes;
  tally.layerBytes += result.layerBytes;
  tally.depthMax = Math.max(tally.depthMax, result.chainDepth);
  const rewrittenBytes = await daemon.metric('varve_compaction_written_bytes_total');
  const { capturedBytes } = tally;
  tally.points.push({ epoch, depth: result.chainDepth, capturedBytes, rewrittenBytes });
}

async function line(
  daemon: BenchDaemon,
  tally: Tally,
  last: CaptureResult,
  captures: number,
): Promise<string> {
  const rewritten = tally.points.at(-1)?.rewrittenBytes ?? NaN;
  const restored = await restoreMs(daemon, last.snapshotId);
  return (
    `${captures} captures: frozen p50 ${ms(percentile(tally.frozen, 0.5))}, p99 ` +
    `${ms(percentile(tally.frozen, 0.99))}; layers ${mib(tally.layerBytes)} ` +
    `(${mib(tally.layerBytes / captures)} each); depth ${last.chainDepth}, at most ` +
    `${tally.depthMax}; rewritten by compaction ${mib(rewritten)}, ratio ` +
    `${(rewritten / tally.capturedBytes).toFixed(2)} (budget 4); on disk: local layers ` +
    `${mib(daemon.diskBytes('layers'))}, store ${mib(daemon.diskBytes('artifacts'))}; ` +
    `restore ${ms(restored)}`
  );
}

/** Waits for the compaction that the last capture started. */
async function compacted(daemon: BenchDaemon, vmId: string, depth: number): Promise<void> {
  while ((await daemon.chainDepth(vmId)) >= depth) {
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}
