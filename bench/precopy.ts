/** Frozen time with and without rounds of pre-copy, in turns on two daemons in the same run. */
import { median } from './bare.ts';
import { BenchDaemon } from './daemon.ts';
import { mib, ms, resultOf, type Print } from './figures.ts';
import type { CaptureResult } from '../src/capture/types.ts';
import type { MiniVm } from '../src/minivm/launch.ts';

export interface PrecopySizes {
  readonly rounds: number;
  /** Written before each capture. */
  readonly writtenMib: number;
  /** Of that, what is rewritten all the time. */
  readonly hotMib: number;
}

const pagesPerMib = 256;
const firstPage = 1024;
/** How fast the hot set is rewritten, pages a second. */
const hotRate = 2000;

interface Setting {
  readonly precopy: number;
  readonly daemon: BenchDaemon;
  readonly vm: MiniVm;
  readonly vmId: string;
  readonly results: CaptureResult[];
}

export async function precopyRounds(size: PrecopySizes, print: Print): Promise<void> {
  print(
    `precopy: ${size.writtenMib} MiB written before each capture, ${size.hotMib} MiB of it rewritten ` +
      `at ${hotRate} pages a second meanwhile; e2b with dirty epochs, resume_after = copy, ` +
      `medians of ${size.rounds}`,
  );
  await using without = await start(0);
  await using two = await start(2);
  for (let round = 0; round <= size.rounds; round++) {
    for (const setting of [without, two]) await captureOnce(setting, size, round);
  }
  for (const setting of [without, two]) print(lineOf(setting));
}

async function start(precopy: number): Promise<Setting & AsyncDisposable> {
  const daemon = await BenchDaemon.start({ pipeline: { precopy: { rounds: precopy } } });
  const vm = await daemon.vm({ dialect: 'e2b', memoryMib: 128, dirtyEpochs: true });
  const { vmId } = await daemon.attach(vm);
  const dispose = async (): Promise<void> => {
    await vm[Symbol.asyncDispose]();
    await daemon[Symbol.asyncDispose]();
  };
  return { precopy, daemon, vm, vmId, results: [], [Symbol.asyncDispose]: dispose };
}

async function captureOnce(setting: Setting, size: PrecopySizes, round: number): Promise<void> {
  const { vm, daemon, vmId, results } = setting;
  const written = { firstPage, pageCount: size.writtenMib * pagesPerMib };
  await vm.run({ pages: written, value: round + 1 });
  const hot = { firstPage, pageCount: size.hotMib * pagesPerMib };
  await vm.program({ pages: hot, loop: true, pagesPerSecond: hotRate });
  const result = resultOf(await daemon.capture(vmId, { resumeAfter: 'copy' }));
  await vm.stopProgram();
  // The first has everything since the start.
  if (round > 0) results.push(result);
}

function lineOf({ precopy, results }: Setting): string {
  const of = (value: (result: CaptureResult) => number): number => median(results.map(value));
  return (
    `rounds = ${precopy}: frozen ${ms(of((r) => r.frozenMs))} ` +
    `(${results.map((r) => r.frozenMs.toFixed(1)).join(', ')}), in all ${ms(of((r) => r.totalMs))}; ` +
    `rounds copied ${of((r) => r.precopyRounds)}, copied ahead ` +
    `${mib(of((r) => r.precopiedPages) * 4096)}, dead bytes ${mib(of((r) => r.supersededBytes))}, ` +
    `layer ${mib(of((r) => r.layerBytes))}`
  );
}
