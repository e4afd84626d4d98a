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
import { silentLogger } from '../observability/log.ts';
import { Cleanups } from '../pipeline/cleanups.ts';
import { materialise } from '../restore/materialise.ts';
import { directHolds } from '../restore/restore-hold.ts';
import { Failure, type FailureDetail } from '../result.ts';
import { nodeId, vmId, type HoldId } from '../units.ts';
import { exitCodes, globalOptions } from './context.ts';
import { firecrackerVm, MEMORY_MIB, PAGES, smallVm, type DemoGuest } from './demo-guest.ts';
import { demoReport, type DemoOutcome, type DemoStep } from './demo-report.ts';
import { openParts, valueOf, type Parts } from './parts.ts';
import { progressLine, type ProgressLine } from './progress.ts';
import { unsupervised } from './supervise.ts';

interface DemoOptions {
  readonly folder: string;
  readonly dialect: 'aenv' | 'e2b' | 'firecracker';
  readonly trackingMode: 'mincore' | 'dirty';
  /** A real VMM, instead of the small VM. */
  readonly firecracker?: string;
}

interface Stage extends AsyncDisposable {
  readonly parts: Parts;
  readonly vm: DemoGuest;
}

async function setUp(options: DemoOptions): Promise<Stage> {
  // Short, since socket paths may not be longer than 107 bytes.
  const socketFolder = mkdtempSync(join(tmpdir(), 'varve-demo-'));
  const config = configOf({
    node: { id: 'demo' },
    paths: { state: join(options.folder, 'state'), socket_roots: [socketFolder] },
    memory_snapshot: { tracking_mode: options.trackingMode },
    pipeline: { slab_budget: '128MiB' },
  });
  const stack = new Cleanups();
  stack.defer(() => rmSync(socketFolder, { recursive: true, force: true }));
  try {
    const parts = await openParts({
      config,
      logger: silentLogger(),
      supervise: unsupervised,
    });
    stack.useAsync(parts);
    valueOf(await parts.catalogTried);
    const vm = await startGuest(options, socketFolder);
    stack.useAsync(vm);
    return { parts, vm, [Symbol.asyncDispose]: () => stack[Symbol.asyncDispose]() };
  } catch (error) {
    await stack[Symbol.asyncDispose]();
    throw error;
  }
}

function startGuest(options: DemoOptions, folder: string): Promise<DemoGuest> {
  const { dialect, trackingMode, firecracker } = options;
  if (firecracker !== undefined) return firecrackerVm(firecracker, folder);
  const dirtyEpochs = dialect !== 'firecracker' && trackingMode === 'dirty';
  return smallVm({ folder, dialect, dirtyEpochs });
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

/** A base and three epochs, of a guest that never stops writing. */
async function captureWhileWriting(stage: Stage, line: ProgressLine): Promise<DemoStep[]> {
  const { parts, vm } = stage;
  line.show('the guest writes its first pages');
  await vm.boot();
  const steps: DemoStep[] = [];
  for (const name of ['base', 'epoch 1', 'epoch 2', 'epoch 3']) {
    line.show(`capturing ${name} while the guest writes`);
    await vm.writesOn();
    steps.push({ name, capture: await capture(parts, `demo-${name.replace(' ', '-')}`) });
  }
  return steps;
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
  const restoreMs = performance.now() - restoreStartedMs;
  const { memoryPath, vmStatePath } = files;
  if (vmStatePath === null) throw new Error('the snapshot has no VM state');
  line.show('comparing every page');
  const { differing, runsOn } = await vm.compare({ memoryPath, vmStatePath });
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
  const { socketPath } = vm;
  const attached = valueOf(await parts.service.attach({ socketPath, vmId: 'demo-vm' }));
  const steps = await captureWhileWriting(stage, line);
  const { step, files, restoreMs, differing, runsOn } = await prove(stage, options, line);
  const { snapshotId } = resultOf(step.capture);
  const resolved = valueOf(await parts.catalog.resolve(snapshotId));
  return {
    backend: vm.backend,
    backendReason: vm.backendReason,
    vmm: vm.vmm,
    dialect: attached.dialect,
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
    .option('--firecracker <path>', 'a real Firecracker with a bare guest, not the small VM')
    .action(async (options: DemoOptions, command: Command) => {
      const { firecracker } = options;
      const outcome = await runDemo({
        ...options,
        folder: resolve(options.folder),
        ...(firecracker === undefined ? {} : { firecracker: resolve(firecracker) }),
      });
      const isJson = globalOptions(command).json === true;
      const text = isJson ? JSON.stringify(outcome, null, 2) : demoReport(outcome);
      process.stdout.write(`${text}\n`);
      if (outcome.differing > 0 || !outcome.runsOn) process.exitCode = exitCodes.failed;
    });
}
