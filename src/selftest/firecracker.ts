/** Real VMM processes, in a folder of their own, for as long as a test of them takes. */
import { spawn, type ChildProcess } from 'node:child_process';
import { once } from 'node:events';
import { mkdir, readFile, writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { systemClock } from '../clock.ts';
import { Failure, type FailureDetail, type Result } from '../result.ts';
import { VmmClient } from '../vmm/client.ts';
import { GuestLines, guestKernelPath, kernelCommandLine, type GuestSettings } from './guest.ts';

export interface MachineOptions {
  readonly memoryMib: number;
  readonly tracked: boolean;
  readonly hugePages: boolean;
}

/** A snapshot that a VMM can load. */
export interface VmFiles {
  readonly memoryPath: string;
  readonly vmStatePath: string;
}

/** Longest wait for a VMM to listen, or for its guest to say anything. */
const startTimeoutMs = 60_000;
const askAgainMs = 10;

/** One VMM process. Disposal kills and reaps it. */
export class Firecracker implements AsyncDisposable {
  readonly folder: string;
  readonly client: VmmClient;
  readonly guest = new GuestLines();
  /** Aborted once the process has ended. */
  readonly ended: AbortSignal;
  readonly #child: ChildProcess;
  readonly #exited: Promise<unknown>;

  private constructor(folder: string, child: ChildProcess) {
    this.folder = folder;
    this.client = new VmmClient({ socketPath: socketIn(folder) });
    this.#child = child;
    const ended = new AbortController();
    this.ended = ended.signal;
    this.#exited = once(child, 'exit').then(([code, signal]) => {
      const how = code === null ? `was ended by ${String(signal)}` : `ended with ${String(code)}`;
      ended.abort(new Failure({ kind: 'vmm-ended', message: `the VMM in ${folder} ${how}` }));
    });
  }

  /**
   * Returns once its API socket is there.
   * @param folder made here; gets the socket, the log, and whatever the VMM writes
   */
  static async start(binary: string, folder: string, signal: AbortSignal): Promise<Firecracker> {
    await mkdir(folder, { recursive: true });
    const log = join(folder, 'vmm.log');
    await writeFile(log, '');
    const socket = socketIn(folder);
    const args = ['--api-sock', socket, '--id', 'selftest', '--log-path', log, '--level', 'Warn'];
    const child = spawn(binary, args, { cwd: folder, stdio: ['ignore', 'pipe', 'pipe'] });
    await spawned(child, binary);
    const vmm = new Firecracker(folder, child);
    try {
      createInterface({ input: child.stdout }).on('line', (line) => vmm.guest.take(line));
      child.stderr.resume();
      await vmm.#listens(vmm.#within(signal));
      return vmm;
    } catch (error) {
      const said = await readFile(log, 'utf8').catch(() => '');
      await vmm[Symbol.asyncDispose]();
      throw said === '' ? error : explained(error, said);
    }
  }

  /** A socket is there a moment before anybody listens on it. */
  async #listens(signal: AbortSignal): Promise<void> {
    for (;;) {
      const asked = await this.client.info(signal);
      if (asked.ok) return;
      if (asked.error.kind !== 'vmm-unreachable') throw new Failure(asked.error);
      await systemClock.sleep(askAgainMs, signal);
    }
  }

  /** Tells the VMM everything but to start. */
  async configure(machine: MachineOptions, guest: GuestSettings, signal: AbortSignal) {
    const config = {
      vcpu_count: 1,
      mem_size_mib: machine.memoryMib,
      track_dirty_pages: machine.tracked,
      ...(machine.hugePages ? { huge_pages: '2M' } : {}),
    };
    const boot = { kernel_image_path: guestKernelPath(), boot_args: kernelCommandLine(guest) };
    valueOf(await this.client.change('PUT', '/machine-config', config, signal));
    valueOf(await this.client.change('PUT', '/boot-source', boot, signal));
  }

  async boot(signal: AbortSignal): Promise<void> {
    const action = { action_type: 'InstanceStart' };
    valueOf(await this.client.change('PUT', '/actions', action, signal));
  }

  /** Leaves the VM paused. */
  async load(files: VmFiles, tracked: boolean, signal: AbortSignal): Promise<void> {
    const load = {
      snapshotPath: files.vmStatePath,
      memory: { backend: 'File', path: files.memoryPath },
      trackDirtyPages: tracked,
      resume: false,
    } as const;
    valueOf(await this.client.loadSnapshot(load, signal));
  }

  async pause(signal: AbortSignal): Promise<void> {
    valueOf(await this.client.pause(signal));
  }

  async resume(signal: AbortSignal): Promise<void> {
    valueOf(await this.client.resume(signal));
  }

  /** The VMM's own snapshot of the paused VM. With tracking it forgets what was written. */
  async ownSnapshot(name: string, signal: AbortSignal): Promise<VmFiles> {
    const files = {
      memoryPath: join(this.folder, `${name}.memory`),
      vmStatePath: join(this.folder, `${name}.state`),
    };
    const create = {
      type: 'Full',
      snapshotPath: files.vmStatePath,
      memFilePath: files.memoryPath,
    } as const;
    valueOf(await this.client.createSnapshot(create, signal));
    return files;
  }

  /** Waits for rounds of the guest; fails as `guest-silent`, or when the VMM ends. */
  async rounds(count: number, signal: AbortSignal): Promise<number> {
    const { round } = await this.guest.more(count, this.#within(signal));
    return round;
  }

  #within(signal: AbortSignal): AbortSignal {
    const message = `the VMM in ${this.folder} or its guest said nothing for ${startTimeoutMs} ms`;
    const late = new AbortController();
    setTimeout(
      () => late.abort(new Failure({ kind: 'guest-silent', message })),
      startTimeoutMs,
    ).unref();
    return AbortSignal.any([signal, this.ended, late.signal]);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.#child.kill('SIGKILL');
    await this.#exited;
  }
}

function socketIn(folder: string): string {
  return join(folder, 'api.sock');
}

export function valueOf<T, E extends FailureDetail>(result: Result<T, E>): T {
  if (result.ok) return result.value;
  throw new Failure(result.error);
}

async function spawned(child: ChildProcess, binary: string): Promise<void> {
  try {
    await once(child, 'spawn');
  } catch (error) {
    const message = `${binary} cannot be started: ${(error as Error).message}`;
    throw new Failure({ kind: 'vmm-not-started', message }, error);
  }
}

/** The last line of its log says more than how the process ended. */
function explained(error: unknown, log: string): unknown {
  if (!(error instanceof Failure)) return error;
  const { kind, message } = (error as Failure).detail;
  const line = log.trimEnd().split('\n').at(-1) ?? '';
  return new Failure({ kind, message: `${message}: ${line}` }, error);
}
