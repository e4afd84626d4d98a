/**
 * `varve demo`: the main job from end to end, on real parts. A small VM keeps writing while it is
 * captured four times; a fifth capture, of the VM paused by its owner, is restored into a second VM
 * and compared page by page, while both stand still.
 */
import { mkdirSync, mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';
import { Option, type Command } from 'commander';
import type { CaptureResult, CaptureView } from '../capture/types.ts';
import { configOf } from '../config/load.ts';
import { launchMiniVm, type MiniVm } from '../minivm/launch.ts';
import { silentLogger } from '../observability/log.ts';
import { materialise, type Materialised } from '../restore/materialise.ts';
import { directHolds } from '../restore/restore-hold.ts';
import { Failure, type FailureDetail } from '../result.ts';
import { MIB, PAGE_BYTES, nodeId, vmId, type HoldId } from '../units.ts';
import { exitCodes, globalOptions } from './context.ts';
import { demoReport, type DemoOutcome, type DemoStep } from './demo-report.ts';
import { openParts, valueOf, type Parts } from './parts.ts';
import { progressLine, type ProgressLine } from './progress.ts';
import { unsupervised } from './supervise.ts';

const MEMORY_MIB = 256;
const PAGES = (MEMORY_MIB * MIB) / PAGE_BYTES;
/** What the guest has written before the base is captured. */
const FIRST_PAGES = 20_000;
/** The hot set that it writes over and over while it is captured. */
const HOT_PAGES = 8_192;
const PAGES_PER_SECOND = 8_000;
const DEMO_SEED = 2024;

interface DemoOptions {
  readonly folder: string;
  readonly dialect: 'aenv' | 'e2b' | 'firecracker';
  readonly trackingMode: 'mincore' | 'dirty';
}

interface Stage extends AsyncDisposable {
  readonly parts: Parts;
  readonly vm: MiniVm;
  /** Short, since socket paths may not be longer than 107 bytes. */
  readonly socketFolder: string;
}

async function setUp(options: DemoOptions): Promise<Stage> {
  const socketFolder = mkdtempSync(join(tmpdir(), 'varve-demo-'));
  const config = configOf({
    node: { id: 'demo' },
    paths: { state: join(options.folder, 'state'), socket_roots: [socketFolder] },
    memory_snapshot: { tracking_mode: options.trackingMode },
    pipeline: { slab_budget: '128MiB' },
  });
  const stack = new AsyncStack();
  stack.defer(() => rmSync(socketFolder, { recursive: true, force: true }));
  try {
    const parts = await openParts({
      config,
      logger: silentLogger(),
      supervise: unsupervised,
    });
    stack.defer(async () => {
      await parts[Symbol.asyncDispose]();
    });
    valueOf(await parts.catalogTried);
    const vm = await launchMiniVm({
      id: 'demo-vm',
      dialect: options.dialect,
      dirtyEpochs: options.dialect !== 'firecracker' && options.trackingMode === 'dirty',
      memoryMib: MEMORY_MIB,
      socketPath: join(socketFolder, 'demo-vm.sock'),
      start: false,
    });
    stack.defer(async () => {
      await vm[Symbol.asyncDispose]();
    });
    return { parts, vm, socketFolder, [Symbol.asyncDispose]: () => stack.close() };
  } catch (error) {
    await stack.close();
    throw error;
  }
}

/** Undoes in reverse order. */
class AsyncStack {
  readonly #undo: (() => void | Promise<void>)[] = [];
  defer(undo: () => void | Promise<void>): void {
    this.#undo.push(undo);
  }
  async close(): Promise<void> {
    for (const undo of this.#undo.splice(0).reverse()) await undo();
  }
}

const never = new AbortController().signal;

async function capture(parts: Parts, alias: string): Promise<CaptureView> {
  const started = valueOf(await parts.service.startCapture(vmId('demo-vm'), { alias }));
  const ended = await parts.service.waitFor(started.captureId, never);
  if (ended.status === 'published') return ended;
  throw new Failure(ended.failure ?? { kind: 'capture-aborted', message: 'the capture aborted' });
}

function resultOf(view: CaptureView): CaptureResult {
  if (view.result === null) throw new Error(`capture ${view.captureId} has no result`);
  return view.result;
}

const random = (seed: number) => Math.imul(seed, 0x9e3779b1) >>> 0;

/** Waits until the guest has written so many pages more; it writes at a known rate. */
async function untilWritten(vm: MiniVm, pages: number): Promise<void> {
  const { pagesTotal } = await vm.counters();
  for (;;) {
    const now = await vm.counters();
    if (now.crash !== '') throw new Error(`the guest crashed: ${now.crash}`);
    if (now.pagesTotal - pagesTotal >= pages) return;
  }
}

/** A base and three epochs, of a guest that never stops writing. */
async function captureWhileWriting(stage: Stage, line: ProgressLine): Promise<DemoStep[]> {
  const { parts, vm } = stage;
  line.show('the guest writes its first pages');
  await vm.run({ pages: { seed: DEMO_SEED, count: FIRST_PAGES }, value: 1 });
  await vm.program({
    pages: { seed: random(DEMO_SEED), count: HOT_PAGES },
    value: 2,
    loop: true,
    pagesPerSecond: PAGES_PER_SECOND,
  });
  const steps: DemoStep[] = [];
  for (const name of ['base', 'epoch 1', 'epoch 2', 'epoch 3']) {
    line.show(`capturing ${name} while the guest writes`);
    await untilWritten(vm, 2_000);
    steps.push({ name, capture: await capture(parts, `demo-${name.replace(' ', '-')}`) });
  }
  return steps;
}

async function restoreInto(stage: Stage, files: Materialised): Promise<MiniVm> {
  if (files.vmStatePath === null) throw new Error('the snapshot has no VM state');
  const { memoryPath, vmStatePath } = files;
  return launchMiniVm({
    id: 'demo-restored',
    socketPath: join(stage.socketFolder, 'demo-restored.sock'),
    restore: { memoryPath, snapshotPath: vmStatePath },
  });
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

function notReleased(hold: HoldId, error: FailureDetail): never {
  throw new Failure({ ...error, message: `hold ${hold} could not be released: ${error.message}` });
}

async function prove(stage: Stage, options: DemoOptions, line: ProgressLine) {
  const { parts, vm } = stage;
  line.show('capturing once more, paused by the owner');
  await vm.pause();
  const last = await capture(parts, 'demo-last');
  const restoreStartedMs = performance.now();
  const holds = directHolds(parts.catalog, notReleased);
  const node = nodeId(parts.config.node.id);
  const files = await materialise(
    { ...parts, nodeId: node, holds },
    {
      snapshot: resultOf(last).snapshotId,
      folder: join(options.folder, 'restored'),
      signal: never,
      onProgress: (at) => line.bar('restoring', at.doneBytes, at.totalBytes),
    },
  );
  await using restored = await restoreInto(stage, files);
  const restoreMs = performance.now() - restoreStartedMs;
  line.show('comparing every page');
  const differing = await differences(vm, restored);
  const runsOn = await goesOn(restored);
  await vm.resume();
  const step: DemoStep = { name: 'last (paused by owner)', capture: last };
  return { step, files, restoreMs, differing, runsOn };
}

export async function runDemo(options: DemoOptions): Promise<DemoOutcome> {
  const startedMs = performance.now();
  for (const part of ['state', 'restored']) {
    rmSync(join(options.folder, part), { recursive: true, force: true });
  }
  mkdirSync(options.folder, { recursive: true });
  using line = progressLine();
  line.show('starting');
  await using stage = await setUp(options);
  const { parts, vm } = stage;
  // Attached before it boots, so that every write of the guest is tracked.
  valueOf(await parts.service.attach({ socketPath: vm.socketPath, vmId: 'demo-vm' }));
  await vm.configure({ memoryMib: MEMORY_MIB, track: true });
  await vm.start();
  const steps = await captureWhileWriting(stage, line);
  const { step, files, restoreMs, differing, runsOn } = await prove(stage, options, line);
  const { snapshotId } = resultOf(step.capture);
  const resolved = valueOf(await parts.catalog.resolve(snapshotId));
  return {
    backend: vm.backend,
    backendReason: vm.backendReason,
    dialect: options.dialect,
    trackingMode: options.trackingMode,
    memoryMib: MEMORY_MIB,
    pages: PAGES,
    differing,
    runsOn,
    restoreMs,
    steps: [...steps, step],
    totalMs: performance.now() - startedMs,
    files: {
      manifest: parts.store.localPath(resolved.content.manifest.key),
      artifacts: parts.config.paths.artifacts,
      catalog: parts.config.catalog.url.replace(/^sqlite:/, ''),
      nodeDb: join(parts.config.paths.state, 'node.db'),
      memory: files.memoryPath,
      vmState: files.vmStatePath ?? '',
    },
  };
}

export function addDemo(program: Command): void {
  program
    .command('demo')
    .description('capture a small VM that keeps writing, restore it, compare every page')
    .option(
      '--folder <path>',
      'where the files go; those of an earlier demo go away',
      '.varve/demo',
    )
    .addOption(
      new Option('--dialect <name>', 'which VMM API the small VM speaks')
        .choices(['aenv', 'e2b', 'firecracker'])
        .default('aenv'),
    )
    .addOption(
      new Option('--tracking-mode <mode>', 'where the dirty set comes from')
        .choices(['mincore', 'dirty'])
        .default('dirty'),
    )
    .action(async (options: DemoOptions, command: Command) => {
      const outcome = await runDemo({ ...options, folder: resolve(options.folder) });
      const isJson = globalOptions(command).json === true;
      const text = isJson ? JSON.stringify(outcome, null, 2) : demoReport(outcome);
      process.stdout.write(`${text}\n`);
      if (outcome.differing > 0 || !outcome.runsOn) process.exitCode = exitCodes.failed;
    });
}
