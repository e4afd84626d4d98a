import { spawn, type ChildProcess } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import path from 'node:path';
import { createInterface } from 'node:readline';
import { MiniVmClient, type RegionOption, type RestoreOptions } from './client.ts';
import type { ProgramBody } from './control-schema.ts';
import { backends, type Dialect } from './guest.ts';
import { packageRoot } from './native.ts';

export interface LaunchOptions {
  /** Default `aenv`. */
  readonly dialect?: Dialect;
  /** Default: a socket in a fresh temporary folder, removed at the end. */
  readonly socketPath?: string;
  readonly id?: string;
  /** Default `MINIVM_BACKEND`, else `auto`: KVM where it works, otherwise a thread. */
  readonly backend?: (typeof backends)[number];
  /** Default 128. */
  readonly memoryMib?: number;
  /** Instead of the layout that a VM of `memoryMib` has. */
  readonly regions?: readonly RegionOption[];
  /** `track_dirty_pages`, default true. */
  readonly track?: boolean;
  /** Offer `PUT /vm/dirty-epoch`; default false. */
  readonly dirtyEpochs?: boolean;
  /** Save as upstream does: the state first, then the memory; default false. */
  readonly upstreamState?: boolean;
  /** Default true: configured and running. False: not started (a snapshot can be loaded). */
  readonly start?: boolean;
  /** Restore this snapshot instead of starting. */
  readonly restore?: RestoreOptions;
  /** Given to the guest once it runs. */
  readonly program?: ProgramBody;
}

export interface MiniVmExit {
  readonly code: number | null;
  readonly signal: NodeJS.Signals | null;
}

/** A small VM in its own process. Disposal kills and reaps it; it also dies with this process. */
export class MiniVm extends MiniVmClient implements AsyncDisposable {
  readonly pid: number;
  readonly backend: 'kvm' | 'thread';
  readonly backendReason: string;
  /** Resolves when the process is gone. */
  readonly exited: Promise<MiniVmExit>;
  readonly #child: ChildProcess;
  readonly #folder: string | null;

  constructor(
    child: ChildProcess,
    ready: Ready,
    exited: Promise<MiniVmExit>,
    folder: string | null,
  ) {
    super(ready.socketPath);
    this.pid = ready.pid;
    this.backend = ready.backend;
    this.backendReason = ready.backendReason;
    this.exited = exited;
    this.#child = child;
    this.#folder = folder;
  }

  /** Ends the process; resolves once it is reaped. Its socket stays until disposal. */
  async kill(signal: NodeJS.Signals = 'SIGKILL'): Promise<MiniVmExit> {
    this.#child.kill(signal);
    return this.exited;
  }

  /** Closes the pipe that ties the process to this one; resolves when it is reaped. */
  async hangUp(): Promise<MiniVmExit> {
    this.#child.stdin?.end();
    return this.exited;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.kill();
    rmSync(this.socketPath, { force: true });
    if (this.#folder !== null) rmSync(this.#folder, { recursive: true, force: true });
  }
}

interface Ready {
  readonly pid: number;
  readonly socketPath: string;
  readonly backend: 'kvm' | 'thread';
  readonly backendReason: string;
}

/** Starts a small VM and returns once its API answers and it is in the asked-for state. */
export async function launchMiniVm(options: LaunchOptions = {}): Promise<MiniVm> {
  const folder =
    options.socketPath === undefined ? mkdtempSync(path.join(tmpdir(), 'minivm-')) : null;
  const socketPath = options.socketPath ?? path.join(folder ?? '', 'api.sock');
  try {
    const vm = await spawnVm(options, socketPath, folder);
    try {
      await bringUp(vm, options);
    } catch (error) {
      await vm[Symbol.asyncDispose]();
      throw error;
    }
    return vm;
  } catch (error) {
    if (folder !== null) rmSync(folder, { recursive: true, force: true });
    throw error;
  }
}

/** `MINIVM_BACKEND` chooses for every small VM whose starter does not care. */
function backendOf({ backend }: LaunchOptions): (typeof backends)[number] {
  if (backend !== undefined) return backend;
  const asked = process.env['MINIVM_BACKEND'] ?? 'auto';
  const known = backends.find((name) => name === asked);
  if (known === undefined) {
    throw new Error(`MINIVM_BACKEND=${asked}: use ${backends.join(', ')}`);
  }
  return known;
}

async function spawnVm(
  options: LaunchOptions,
  socketPath: string,
  folder: string | null,
): Promise<MiniVm> {
  const main = path.join(packageRoot(), 'dist', 'src', 'minivm', 'main.js');
  const args = [main, '--exit-with-stdin', '--api-sock', socketPath];
  args.push('--dialect', options.dialect ?? 'aenv', '--backend', backendOf(options));
  if (options.id !== undefined) args.push('--id', options.id);
  if (options.dirtyEpochs === true) args.push('--dirty-epochs');
  if (options.upstreamState === true) args.push('--upstream-state');
  const child = spawn(process.execPath, args, { stdio: ['pipe', 'pipe', 'pipe'] });
  const exited = once(child, 'exit').then(([code, signal]) => ({
    code: code as number | null,
    signal: signal as NodeJS.Signals | null,
  }));
  let complaint = '';
  child.stderr.on('data', (chunk: Buffer) => (complaint += chunk.toString()));
  const lines = createInterface({ input: child.stdout });
  const first = await Promise.race([
    once(lines, 'line').then(([line]) => line as string),
    once(child, 'close').then(() => null),
  ]);
  if (first === null) throw new Error(`the small VM did not start: ${complaint.trim()}`);
  return new MiniVm(child, JSON.parse(first) as Ready, exited, folder);
}

async function bringUp(vm: MiniVm, options: LaunchOptions): Promise<void> {
  if (options.restore !== undefined) {
    await vm.loadSnapshot(options.restore);
  } else if (options.start !== false) {
    await vm.configure({ memoryMib: options.memoryMib ?? 128, track: options.track ?? true });
    if (options.regions !== undefined) await vm.setRegions(options.regions);
    await vm.start();
  }
  if (options.program !== undefined) await vm.program(options.program);
}
