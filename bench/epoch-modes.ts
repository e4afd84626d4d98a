/**
 * The same changes captured in every tracking mode, with dedup off and on, and with each compression;
 * and what dirty tracking costs a guest while nobody captures.
 */
import type { CaptureView } from '../src/capture/types.ts';
import { launchMiniVm, type LaunchOptions, type MiniVm } from '../src/minivm/launch.ts';
import { median } from './bare.ts';
import { BenchDaemon } from './daemon.ts';
import { mib, ms, restoreMs, resultOf, type Print } from './figures.ts';

export interface ModeSizes {
  readonly rounds: number;
  /** What the guest has written before the first capture. */
  readonly touchedMib: number;
  /** What it writes before each further one. */
  readonly changedMib: number;
  readonly compressedMib: number;
  readonly compressions: readonly ('none' | 'lz4' | 'zstd')[];
  /** How long the guest runs each time with tracking on, and off. */
  readonly trackingMs: number;
  /** How many of the modes, in the order of their list. */
  readonly modeCount: number;
}

const firstPage = 1024;
const pagesOfMib = 256;

interface Mode {
  readonly name: string;
  readonly tracking: 'dirty' | 'mincore' | 'pagemap';
  readonly options: LaunchOptions;
}

const modes: readonly Mode[] = [
  { name: 'mincore, e2b', tracking: 'mincore', options: { dialect: 'e2b', track: false } },
  { name: 'dirty, e2b', tracking: 'dirty', options: { dialect: 'e2b' } },
  { name: 'pagemap, e2b, restored', tracking: 'pagemap', options: { dialect: 'e2b' } },
  {
    name: 'dirty with VMM epochs, aenv',
    tracking: 'dirty',
    options: { dialect: 'aenv', dirtyEpochs: true },
  },
  { name: 'dirty, firecracker', tracking: 'dirty', options: { dialect: 'firecracker' } },
];

interface Row {
  readonly frozenMs: number;
  readonly totalMs: number;
  readonly selected: number;
  readonly dropped: number;
  readonly layerBytes: number;
  readonly restoreMs: number;
}

export async function trackingModes(size: ModeSizes, print: Print): Promise<void> {
  const { touchedMib, changedMib, rounds } = size;
  print(
    `tracking modes: guest of ${touchedMib + 8} MiB, all written once; before each capture ` +
      `${mib(changedMib * 2 ** 20)} are rewritten, a quarter of it with the bytes it had; ` +
      `resume_after = copy, medians of ${rounds}`,
  );
  await using daemon = await BenchDaemon.start();
  for (const mode of modes.slice(0, size.modeCount)) {
    await using vm = await started(daemon, mode, size);
    const { vmId } = await daemon.attach(vm, mode.tracking, vm.launchParent);
    await rewrite(vm, size, 0);
    await daemon.capture(vmId);
    const off = await measured(daemon, vm, vmId, size, 'off');
    const on = await measured(daemon, vm, vmId, size, 'parent');
    for (const [dedup, row] of [
      ['off', off],
      ['parent', on],
    ] as const) {
      print(
        `${mode.name}, dedup ${dedup}: frozen ${ms(row.frozenMs)}, total ${ms(row.totalMs)}; ` +
          `${row.selected} pages selected, ${row.dropped} dropped; layer ${mib(row.layerBytes)}; ` +
          `restore ${ms(row.restoreMs)}`,
      );
    }
    const usOf = (row: Row): string => ((row.totalMs * 1000) / row.selected).toFixed(2);
    print(
      `${mode.name}: a selected page takes ${usOf(on)} us of the whole capture with dedup, ` +
        `${usOf(off)} us without; ${((on.dropped / on.selected) * 100).toFixed(0)} % are dropped`,
    );
  }
}

/** A VM with all of its memory written; for `pagemap`, one that was restored from a file. */
async function started(
  daemon: BenchDaemon,
  mode: Mode,
  { touchedMib }: ModeSizes,
): Promise<MiniVm & { launchParent?: string }> {
  const memoryMib = touchedMib + 8;
  const vm = await daemon.vm({ ...mode.options, memoryMib });
  await vm.run({ pages: { firstPage, pageCount: touchedMib * pagesOfMib }, value: 1 }, 600_000);
  if (mode.tracking !== 'pagemap') return vm;
  const { vmId } = await daemon.attach(vm);
  const { snapshotId } = resultOf(await daemon.capture(vmId));
  await vm[Symbol.asyncDispose]();
  const { memoryPath, vmStatePath } = await daemon.restore(snapshotId);
  const restore = { memoryPath, snapshotPath: vmStatePath, resume: true };
  return Object.assign(await daemon.vm({ ...mode.options, restore }), { launchParent: snapshotId });
}

/** Three quarters of the changed pages get new bytes, one quarter those it has. */
async function rewrite(vm: MiniVm, { touchedMib, changedMib }: ModeSizes, round: number) {
  const changed = changedMib * pagesOfMib;
  const same = changed / 4;
  const span = { firstPage: firstPage + same, spanPages: touchedMib * pagesOfMib - same };
  await vm.run({ pages: { seed: round, count: changed - same, ...span }, value: round + 2 });
  await vm.run({ pages: { firstPage, pageCount: same }, fill: 'constant', value: 7 });
}

async function measured(
  daemon: BenchDaemon,
  vm: MiniVm,
  vmId: string,
  size: ModeSizes,
  dedup: 'off' | 'parent',
): Promise<Row> {
  const views: CaptureView[] = [];
  for (let round = 1; round <= size.rounds; round++) {
    await rewrite(vm, size, round + (dedup === 'off' ? 0 : size.rounds));
    views.push(await daemon.capture(vmId, { resumeAfter: 'copy', dedup }));
  }
  const results = views.map(resultOf);
  return {
    frozenMs: median(results.map((result) => result.frozenMs)),
    totalMs: median(results.map((result) => result.totalMs)),
    selected: median(results.map((result) => result.selectedPages)),
    dropped: median(results.map((result) => result.deduplicatedPages)),
    layerBytes: median(results.map((result) => result.layerBytes)),
    restoreMs: await restoreMs(daemon, results.at(-1)?.snapshotId ?? ''),
  };
}

/** Full captures of the same guest, of which three quarters of each page are zero, or nothing. */
export async function compressions(size: ModeSizes, print: Print): Promise<void> {
  print(
    `compression: full captures of ${size.compressedMib} MiB of full pages, dedup off, blocks of ` +
      `4 KiB, medians of ${size.rounds}; words: how many of the 1024 words of a page are random`,
  );
  for (const compression of size.compressions) {
    await using daemon = await BenchDaemon.start({ memory_snapshot: { compression } });
    for (const words of [1024, 256]) {
      await using vm = await daemon.vm({ dialect: 'e2b', memoryMib: size.compressedMib + 8 });
      const pages = { firstPage, pageCount: size.compressedMib * pagesOfMib };
      await vm.run({ pages, words, value: 1 }, 600_000);
      const { vmId } = await daemon.attach(vm);
      for (const resumeAfter of ['copy', 'publish'] as const) {
        const views: CaptureView[] = [];
        for (let round = 0; round < size.rounds; round++) {
          views.push(await daemon.capture(vmId, { resumeAfter, dedup: 'off' }));
        }
        const results = views.map(resultOf);
        print(
          `${compression}, ${words} words, resume_after = ${resumeAfter}: frozen ` +
            `${ms(median(results.map((result) => result.frozenMs)))}, total ` +
            `${ms(median(results.map((result) => result.totalMs)))}, layer ` +
            mib(median(results.map((result) => result.layerBytes))),
        );
      }
    }
  }
}

/** Pages a second that a busy guest writes, in turns with tracking on and off. */
export async function trackingCost(size: ModeSizes, print: Print): Promise<void> {
  const rates = { on: [] as number[], off: [] as number[] };
  let backend = '';
  for (let round = 0; round < size.rounds; round++) {
    for (const track of round % 2 === 0 ? [true, false] : [false, true]) {
      await using vm = await launchMiniVm({
        dialect: 'e2b',
        memoryMib: size.touchedMib + 8,
        track,
      });
      const pages = { seed: 1, count: size.touchedMib * pagesOfMib, firstPage };
      // The first pass faults the pages in.
      await vm.program({ pages, value: 1, words: 16, loop: true });
      await vm.waitForPasses(2, 600_000);
      const before = await vm.counters();
      const began = process.hrtime.bigint();
      await new Promise((resolve) => setTimeout(resolve, size.trackingMs));
      const after = await vm.counters();
      const seconds = Number(process.hrtime.bigint() - began) / 1e9;
      rates[track ? 'on' : 'off'].push((after.pagesTotal - before.pagesTotal) / seconds);
      backend = vm.backend;
    }
  }
  const [on, off] = [median(rates.on), median(rates.off)];
  const whose =
    backend === 'kvm' ? "KVM's dirty log" : "the thread guest's own marking, not KVM's log";
  print(
    `steady-state cost of dirty tracking: ${Math.round(on)} pages/s with, ${Math.round(off)} ` +
      `without, ratio ${(on / off).toFixed(3)} (guest: ${backend}; this is ${whose})`,
  );
}
