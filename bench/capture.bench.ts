/**
 * Captures of a real small VM by a real daemon, as ratios to a C program that does the bare system
 * calls on the same ranges of the same process in the same run. Budgets: DESIGN §11.
 */
import type { CaptureResult, CaptureView } from '../src/capture/types.ts';
import type { MiniVm } from '../src/minivm/launch.ts';
import { median, percentile, rangesOf, runBare } from './bare.ts';
import { BenchDaemon } from './daemon.ts';

export interface Sizes {
  readonly rounds: number;
  readonly fullMib: number;
  readonly scatteredMib: number;
  readonly scatteredGuestMib: number;
  readonly largeGuestMib: number;
  readonly memoryMib: number;
  readonly healthMib: number;
}

export const sizes = {
  smoke: {
    rounds: 1,
    fullMib: 24,
    scatteredMib: 4,
    scatteredGuestMib: 64,
    largeGuestMib: 256,
    memoryMib: 32,
    healthMib: 32,
  },
  full: {
    rounds: 5,
    fullMib: 1024,
    scatteredMib: 64,
    scatteredGuestMib: 1024,
    largeGuestMib: 65_536,
    memoryMib: 8192,
    healthMib: 4096,
  },
} as const satisfies Record<string, Sizes>;

const threads = 2;
const seed = 20_261_130;
/** Captures before the measured ones: the first compile the daemon's hot code. */
const warmUps = 5;
/** Pages below hold the guest's own program and mailbox. */
const firstPage = 1024;

export type Print = (line: string) => void;

const benches = {
  full: fullCapture,
  scattered,
  growth: guestGrowth,
  memory: daemonMemory,
  health,
} as const;
export type CapturePart = keyof typeof benches;
export const captureParts = Object.keys(benches) as readonly CapturePart[];

/** @param part only this one; undefined: all, one after the other */
export async function captureBench(size: Sizes, print: Print, part?: CapturePart): Promise<void> {
  for (const name of part === undefined ? captureParts : [part]) await benches[name](size, print);
}

function resultOf(view: CaptureView): CaptureResult {
  if (view.result === null) throw new Error('the capture has no result');
  return view.result;
}

const ms = (value: number): string => `${value.toFixed(1)} ms`;
const mib = (bytes: number): string => `${(bytes / 1024 / 1024).toFixed(1)} MiB`;

async function dirtied(
  daemon: BenchDaemon,
  memoryMib: number,
  pages: { readonly count: number; readonly spread: boolean },
): Promise<MiniVm> {
  const vm = await daemon.vm({ dialect: 'e2b', memoryMib });
  const choice = pages.spread
    ? { seed, count: pages.count, firstPage }
    : { firstPage, pageCount: pages.count };
  await vm.run({ pages: choice, value: 1 }, 600_000);
  return vm;
}

async function warmUp(daemon: BenchDaemon, vmId: string, size: Sizes): Promise<void> {
  for (let i = 0; i < Math.min(warmUps, size.rounds); i++) {
    await daemon.capture(vmId, { resumeAfter: 'copy', dedup: 'off' });
  }
}

/** Every page dirty, no parent, raw: the whole pipeline against readv + pwrite + fsync. */
async function fullCapture(size: Sizes, print: Print): Promise<void> {
  const ours: number[] = [];
  const theirs: number[] = [];
  let bytes = 0;
  let checksum = '';
  await using daemon = await BenchDaemon.start();
  const count = size.fullMib * 256;
  await using vm = await dirtied(daemon, size.fullMib + 8, { count, spread: false });
  const { vmId } = await daemon.attach(vm);
  const ranges = await rangesOf(vm, await vm.set('dirty'));
  for (let round = 0; round < size.rounds; round++) {
    const view = await daemon.capture(vmId, { dedup: 'off' });
    ours.push(resultOf(view).totalMs);
    bytes = resultOf(view).dataBytes;
    const bare = runBare({ pid: vm.pid, ranges, mode: 'capture', threads, folder: daemon.folder });
    theirs.push(bare.seconds * 1000);
    checksum = bare.checksum;
  }
  const ratio = median(ours) / median(theirs);
  print(
    `full capture, ${mib(bytes)} dirty, raw, all stages: ${ms(median(ours))}, bare ` +
      `${ms(median(theirs))}, ratio ${ratio.toFixed(2)} (budget 1.6), checksum ${checksum}`,
  );
}

/** Scattered pages of a larger guest: how long the guest stands still. */
async function scattered(size: Sizes, print: Print): Promise<void> {
  const count = size.scatteredMib * 256;
  for (const resumeAfter of ['copy', 'publish'] as const) {
    await using daemon = await BenchDaemon.start();
    await using vm = await dirtied(daemon, size.scatteredGuestMib, { count, spread: true });
    const { vmId } = await daemon.attach(vm);
    const ranges = await rangesOf(vm, await vm.set('dirty'));
    const frozen: number[] = [];
    const total: number[] = [];
    const bare: number[] = [];
    const bareFreeze: number[] = [];
    const answers: number[] = [];
    const gaps: number[] = [];
    await warmUp(daemon, vmId, size);
    for (let round = 0; round < size.rounds * 2; round++) {
      await vm.resetGap();
      const result = resultOf(await daemon.capture(vmId, { resumeAfter, dedup: 'off' }));
      gaps.push((await vm.counters()).maxGapNs / 1e6);
      frozen.push(result.frozenMs);
      total.push(result.totalMs);
      const folder = daemon.folder;
      const of = { pid: vm.pid, ranges, threads, folder };
      bare.push(runBare({ ...of, mode: 'readv' }).seconds * 1000);
      const freeze = runBare({ ...of, mode: 'freeze', socketPath: vm.socketPath });
      bareFreeze.push(freeze.seconds * 1000);
      answers.push(freeze.answer_seconds * 1000);
    }
    const ratio = median(frozen) / median(bare);
    print(
      `${size.scatteredMib} MiB scattered over ${size.scatteredGuestMib} MiB, resume_after = ` +
        `${resumeAfter}: frozen ${ms(median(frozen))} (largest gap in the guest's counter ` +
        `${ms(median(gaps))}), total ${ms(median(total))}, one bare readv pass ` +
        `${ms(median(bare))}, ratio ${ratio.toFixed(2)}${resumeAfter === 'copy' ? ' (budget 2)' : ''}`,
    );
    print(
      `  the same pause, questions, readv pass and resume in C: ${ms(median(bareFreeze))}, of which ` +
        `${ms(median(answers))} waiting for the small VM's answers, ratio ` +
        (median(frozen) / median(bareFreeze)).toFixed(2),
    );
  }
}

/** The same dirty pages in a guest many times as large. */
async function guestGrowth(size: Sizes, print: Print): Promise<void> {
  const frozen: number[] = [];
  const aside: number[] = [];
  for (const memoryMib of [size.scatteredGuestMib, size.largeGuestMib]) {
    await using daemon = await BenchDaemon.start();
    await using vm = await daemon.vm({ dialect: 'e2b', memoryMib });
    const spanPages = size.scatteredGuestMib * 256 - firstPage;
    const pages = { seed, count: size.scatteredMib * 64, firstPage, spanPages };
    await vm.run({ pages, value: 1 }, 600_000);
    const { vmId } = await daemon.attach(vm);
    const rounds: number[] = [];
    const rest: number[] = [];
    await warmUp(daemon, vmId, size);
    for (let round = 0; round < size.rounds; round++) {
      const view = await daemon.capture(vmId, { resumeAfter: 'copy', dedup: 'off' });
      const { frozenMs } = resultOf(view);
      const bitmap = view.stages.find((report) => report.stage === 'dirty-bitmap');
      rounds.push(frozenMs);
      rest.push(frozenMs - (bitmap?.frozenMs ?? 0));
    }
    frozen.push(median(rounds));
    aside.push(median(rest));
  }
  const [small = NaN, large = NaN] = frozen;
  const [smallAside = NaN, largeAside = NaN] = aside;
  print(
    `frozen time, ${size.scatteredMib / 4} MiB dirty: ${size.scatteredGuestMib} MiB guest ` +
      `${ms(small)}, ${size.largeGuestMib} MiB sparse guest ${ms(large)}, ratio ` +
      `${(large / small).toFixed(2)}; without fetching the bitmap ${ms(smallAside)} and ` +
      `${ms(largeAside)}, ratio ${(largeAside / smallAside).toFixed(2)} (budget 1.5)`,
  );
}

async function daemonMemory(size: Sizes, print: Print): Promise<void> {
  await using daemon = await BenchDaemon.start();
  const count = size.memoryMib * 256;
  await using vm = await dirtied(daemon, size.memoryMib + 8, { count, spread: false });
  const { vmId } = await daemon.attach(vm);
  const before = daemon.memoryBytes('VmRSS');
  daemon.resetPeak();
  await daemon.capture(vmId, { dedup: 'off', pauseDeadlineMs: 600_000 });
  const peak = daemon.memoryBytes('VmHWM');
  print(
    `daemon memory while capturing ${size.memoryMib} MiB: ${mib(before)} before (slab budget 256 MiB ` +
      `included), peak ${mib(peak)}: ${mib(peak - before)} more (budget 64 MiB)`,
  );
}

async function health(size: Sizes, print: Print): Promise<void> {
  await using daemon = await BenchDaemon.start();
  const count = size.healthMib * 256;
  await using vm = await dirtied(daemon, size.healthMib + 8, { count, spread: false });
  const { vmId } = await daemon.attach(vm);
  const latencies: number[] = [];
  const state = { running: true };
  const captured = daemon
    .capture(vmId, { dedup: 'off', pauseDeadlineMs: 600_000 })
    .finally(() => (state.running = false));
  while (state.running) {
    const start = process.hrtime.bigint();
    await daemon.health();
    latencies.push(Number(process.hrtime.bigint() - start) / 1e6);
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
  const took = resultOf(await captured).totalMs;
  print(
    `/healthz while ${size.healthMib} MiB are captured in ${ms(took)}: p50 ` +
      `${ms(percentile(latencies, 0.5))}, p99 ${ms(percentile(latencies, 0.99))}, ` +
      `${latencies.length} asked (budget p99 50 ms)`,
  );
}
