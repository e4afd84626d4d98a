/**
 * A real Firecracker with the project's bare guest: how long it stands still for the VMM's own Diff
 * snapshot, to a disk and to memory, and for captures in mode `dirty`, one after the other in the same
 * run. Each has a VM of its own, so that nobody clears another's dirty set. Budget: DESIGN §11.
 */
import { mkdtempSync, rmSync, statSync } from 'node:fs';
import { join } from 'node:path';
import type { CaptureRequest } from '../src/capture/types.ts';
import { Cleanups } from '../src/pipeline/cleanups.ts';
import { Firecracker, valueOf } from '../src/selftest/firecracker.ts';
import type { GuestSettings } from '../src/selftest/guest.ts';
import { median } from './bare.ts';
import type { Print } from './capture.bench.ts';
import { BenchDaemon } from './daemon.ts';

export interface Sizes {
  readonly rounds: number;
  readonly memoryMib: number;
  /** Pages that a round of the guest writes; two rounds lie between two snapshots. */
  readonly pages: number;
}

export const sizes = {
  smoke: { rounds: 1, memoryMib: 64, pages: 250 },
  full: { rounds: 8, memoryMib: 256, pages: 3800 },
} as const satisfies Record<string, Sizes>;

export interface VmmBenchOptions {
  readonly binary: string;
  /** A folder on tmpfs. */
  readonly memoryFolder: string;
}

const never = new AbortController().signal;
const ms = (value: number): string => `${value.toFixed(1)} ms`;
const kib = (value: number): string => `${(value / 1024).toFixed(0)} KiB`;

/** One row of the result: what each of its rounds cost. */
interface Row {
  readonly name: string;
  readonly frozenMs: number[];
  readonly bytes: number[];
  /** What the guest itself saw, milliseconds. */
  readonly gapMs: number[];
}

/** A VM, and what is done to it once for each round. */
interface Contender {
  readonly row: Row;
  readonly vm: Firecracker;
  readonly once: () => Promise<{ readonly frozenMs: number; readonly bytes: number }>;
}

export async function vmmBench(size: Sizes, print: Print, o: VmmBenchOptions): Promise<void> {
  await using onDisk = await BenchDaemon.start();
  const memory = mkdtempSync(join(o.memoryFolder, 'varve-bench-'));
  try {
    const staging = join(memory, 'staging');
    await using inMemory = await BenchDaemon.start({}, { staging });
    await using vms = new Cleanups();
    const boot = (name: string, daemon: BenchDaemon | null) =>
      booted(size, o.binary, name, daemon ?? onDisk, vms, daemon !== null);
    const contenders: Contender[] = [
      own(await boot('own-disk', null), onDisk.folder, "the VMM's own Diff, to disk"),
      own(await boot('own-memory', null), memory, "the VMM's own Diff, to tmpfs"),
    ];
    for (const resumeAfter of ['copy', 'commit', 'publish'] as const) {
      const vm = await boot(resumeAfter, inMemory);
      const name = `capture, staging on tmpfs, resume_after = ${resumeAfter}`;
      contenders.push(captured(inMemory, vm, resumeAfter, name, { resumeAfter }));
    }
    const vm = await boot('copy-disk', onDisk);
    const name = 'capture, staging on disk, resume_after = copy';
    contenders.push(captured(onDisk, vm, 'copy-disk', name, { resumeAfter: 'copy' }));
    await measure(contenders, size.rounds);
    report(contenders, size, print);
  } finally {
    rmSync(memory, { recursive: true, force: true });
  }
}

/** Boots a VM; where `attached`, the daemon knows it from before its boot. */
async function booted(
  size: Sizes,
  binary: string,
  name: string,
  daemon: BenchDaemon,
  vms: Cleanups,
  attached: boolean,
): Promise<Firecracker> {
  const vm = await Firecracker.start(binary, join(daemon.folder, name), never);
  vms.useAsync(vm);
  const { memoryMib, pages } = size;
  const guest: GuestSettings = { pages, first: pages, pauseMs: 400, seed: 11, ranges: [] };
  await vm.configure({ memoryMib, tracked: true, hugePages: false }, guest, never);
  if (attached) await daemon.attachSocket(vm.client.socketPath, name);
  await vm.boot(never);
  await vm.rounds(1, never);
  await vm.pause(never);
  return vm;
}

const rowOf = (name: string): Row => ({ name, frozenMs: [], bytes: [], gapMs: [] });

function own(vm: Firecracker, folder: string, name: string): Contender {
  let made = 0;
  return {
    row: rowOf(name),
    vm,
    once: async () => {
      made += 1;
      const snapshotPath = join(folder, `own-${made}.state`);
      const memFilePath = join(folder, `own-${made}.memory`);
      const start = process.hrtime.bigint();
      await vm.pause(never);
      const files = { type: 'Diff', snapshotPath, memFilePath } as const;
      valueOf(await vm.client.createSnapshot(files, never));
      await vm.resume(never);
      const frozenMs = Number(process.hrtime.bigint() - start) / 1e6;
      const bytes = statSync(memFilePath).blocks * 512;
      for (const path of [snapshotPath, memFilePath]) rmSync(path);
      return { frozenMs, bytes };
    },
  };
}

function captured(
  daemon: BenchDaemon,
  vm: Firecracker,
  vmId: string,
  name: string,
  request: CaptureRequest,
): Contender {
  return {
    row: rowOf(name),
    vm,
    once: async () => {
      const { result } = await daemon.capture(vmId, request);
      if (result === null) throw new Error(`a capture of ${vmId} has no result`);
      return { frozenMs: result.frozenMs, bytes: result.layerBytes };
    },
  };
}

/**
 * A VM runs only while it is its turn. One turn more than is counted: the first of each is of all
 * that was written since the boot.
 */
async function measure(contenders: readonly Contender[], rounds: number): Promise<void> {
  for (let round = 0; round <= rounds; round++) {
    for (const { row, vm, once } of contenders) {
      await vm.resume(never);
      await vm.rounds(1, never);
      vm.guest.takeLongestUs();
      const { frozenMs, bytes } = await once();
      await vm.rounds(1, never);
      const gapMs = vm.guest.takeLongestUs() / 1000;
      await vm.pause(never);
      if (round === 0) continue;
      row.frozenMs.push(frozenMs);
      row.bytes.push(bytes);
      row.gapMs.push(gapMs);
    }
  }
}

function report(contenders: readonly Contender[], size: Sizes, print: Print): void {
  print(`${size.memoryMib} MiB, twice ${size.pages} pages each, medians of ${size.rounds}:`);
  const [toDisk, toMemory, copy] = contenders.map(({ row }) => median(row.frozenMs));
  for (const { row } of contenders) {
    print(
      `  ${row.name}: frozen ${ms(median(row.frozenMs))} (longest gap in the guest's clock ` +
        `${ms(median(row.gapMs))}), ${kib(median(row.bytes))}`,
    );
  }
  const ratio = (a = NaN, b = NaN): string => (a / b).toFixed(2);
  print(
    `copy with staging on tmpfs: ${ratio(copy, toMemory)} of the VMM's own to tmpfs (budget 1.3), ` +
      `${ratio(copy, toDisk)} of its own to disk`,
  );
}
