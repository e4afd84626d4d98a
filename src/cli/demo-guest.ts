/** What the demo captures: a small VM, or the bare guest in a real Firecracker. */
import { join } from 'node:path';
import { launchMiniVm, type MiniVm } from '../minivm/launch.ts';
import { compareMemory } from '../selftest/compare.ts';
import { Firecracker, type VmFiles } from '../selftest/firecracker.ts';
import { MIB, PAGE_BYTES } from '../units.ts';

export const MEMORY_MIB = 256;
export const PAGES = (MEMORY_MIB * MIB) / PAGE_BYTES;
/** What the guest has written before the base is captured. */
const FIRST_PAGES = 20_000;
/** The hot set that the small VM writes over and over while it is captured. */
const HOT_PAGES = 8_192;
const PAGES_PER_SECOND = 8_000;
const DEMO_SEED = 2024;

/** One VM that keeps writing. Disposal ends it. */
export interface DemoGuest extends AsyncDisposable {
  readonly socketPath: string;
  readonly backend: string;
  readonly backendReason: string;
  /** Who runs it, with its version where it is a real one. */
  readonly vmm: string;
  /** After it was attached, so that every write is tracked. */
  boot(): Promise<void>;
  /** Until it has written some more. */
  writesOn(): Promise<void>;
  pause(): Promise<void>;
  resume(): Promise<void>;
  /** Starts a second VM from the files: pages in which it differs, and whether it runs on. */
  compare(files: VmFiles): Promise<{ readonly differing: number; readonly runsOn: boolean }>;
}

const random = (seed: number) => Math.imul(seed, 0x9e3779b1) >>> 0;

/** @param dirtyEpochs where its dialect has them */
export async function smallVm(o: {
  readonly folder: string;
  readonly dialect: 'aenv' | 'e2b' | 'firecracker';
  readonly dirtyEpochs: boolean;
}): Promise<DemoGuest> {
  const vm = await launchMiniVm({
    id: 'demo-vm',
    dialect: o.dialect,
    dirtyEpochs: o.dirtyEpochs,
    memoryMib: MEMORY_MIB,
    socketPath: join(o.folder, 'demo-vm.sock'),
    start: false,
  });
  return {
    socketPath: vm.socketPath,
    backend: vm.backend,
    backendReason: vm.backendReason,
    vmm: 'the small VM',
    async boot() {
      await vm.configure({ memoryMib: MEMORY_MIB, track: true });
      await vm.start();
      await vm.run({ pages: { seed: DEMO_SEED, count: FIRST_PAGES }, value: 1 });
      await vm.program({
        pages: { seed: random(DEMO_SEED), count: HOT_PAGES },
        value: 2,
        loop: true,
        pagesPerSecond: PAGES_PER_SECOND,
      });
    },
    writesOn: () => untilWritten(vm, 2_000),
    pause: () => vm.pause(),
    resume: () => vm.resume(),
    async compare({ memoryPath, vmStatePath }) {
      await using restored = await launchMiniVm({
        id: 'demo-restored',
        socketPath: join(o.folder, 'demo-restored.sock'),
        restore: { memoryPath, snapshotPath: vmStatePath },
      });
      const differing = await differences(vm, restored);
      return { differing, runsOn: await goesOn(restored) };
    },
    [Symbol.asyncDispose]: () => vm[Symbol.asyncDispose](),
  };
}

/** Waits until the guest has written so many pages more; it writes at a known rate. */
async function untilWritten(vm: MiniVm, pages: number): Promise<void> {
  const { pagesTotal } = await vm.counters();
  for (;;) {
    const now = await vm.counters();
    if (now.crash !== '') throw new Error(`the guest crashed: ${now.crash}`);
    if (now.pagesTotal - pagesTotal >= pages) return;
  }
}

/** Pages that differ between two paused VMs. */
async function differences(one: MiniVm, other: MiniVm): Promise<number> {
  const [a, b] = await Promise.all([one.hashes(0, PAGES), other.hashes(0, PAGES)]);
  if (a.length !== PAGES || b.length !== PAGES) throw new Error('a VM has lost pages');
  return a.reduce((sum, hash, page) => sum + (hash === b[page] ? 0 : 1), 0);
}

/** Whether the restored guest goes on from where it was. */
async function goesOn(vm: MiniVm): Promise<boolean> {
  const before = await vm.counters();
  await vm.resume();
  const deadlineMs = performance.now() + 5_000;
  while (performance.now() < deadlineMs) {
    const now = await vm.counters();
    if (now.crash !== '') return false;
    if (now.counter > before.counter) return true;
  }
  return false;
}

const never = new AbortController().signal;

/** The bare guest. It is compared with the VMM's own snapshot of the paused moment. */
export async function firecrackerVm(binary: string, folder: string): Promise<DemoGuest> {
  const vm = await Firecracker.start(binary, join(folder, 'vm'), never);
  const { version } = await firstAnswer(vm);
  const settings = { pages: 512, first: FIRST_PAGES, pauseMs: 50, seed: DEMO_SEED, ranges: [] };
  return {
    socketPath: vm.client.socketPath,
    backend: 'kvm',
    backendReason: '',
    vmm: `Firecracker ${version}`,
    async boot() {
      const machine = { memoryMib: MEMORY_MIB, tracked: true, hugePages: false };
      await vm.configure(machine, settings, never);
      await vm.boot(never);
      await vm.rounds(1, never);
    },
    async writesOn() {
      await vm.rounds(2, never);
    },
    pause: () => vm.pause(never),
    resume: () => vm.resume(never),
    async compare(files) {
      const own = await vm.ownSnapshot('own', never);
      const { differing } = await compareMemory(files.memoryPath, own.memoryPath, never);
      await using restored = await Firecracker.start(binary, join(folder, 'restored'), never);
      await restored.load(files, true, never);
      await restored.resume(never);
      await restored.rounds(2, never);
      return { differing, runsOn: restored.guest.badPages === 0 };
    },
    [Symbol.asyncDispose]: () => vm[Symbol.asyncDispose](),
  };
}

async function firstAnswer(vm: Firecracker): Promise<{ readonly version: string }> {
  const info = await vm.client.info(never);
  return { version: info.ok ? info.value.vmm_version : 'of an unknown version' };
}
