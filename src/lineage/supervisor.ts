/**
 * Starts `varve-supervisor`, the helper process that resumes our paused VMs when this process dies, and
 * keeps it told. A call of `paused` resolves once the kernel has the line, so that it reaches the helper
 * however this process ends; only then may the pause be sent.
 */
import { spawn } from 'node:child_process';
import type { ChildProcessByStdio } from 'node:child_process';
import { once } from 'node:events';
import { existsSync } from 'node:fs';
import { dirname, join } from 'node:path';
import type { Readable, Writable } from 'node:stream';
import type { Clock } from '../clock.ts';
import type { FailureDetail, Result } from '../result.ts';
import { assert, err, ok } from '../result.ts';
import { millis } from '../units.ts';
import type { Millis, VmId } from '../units.ts';

export interface SupervisedVm {
  readonly vmId: VmId;
  /** Absolute: the helper works in `/`. */
  readonly socketPath: string;
  readonly pid: number;
  readonly startTimeTicks: bigint;
}

export interface SupervisorOptions {
  /** The program; `supervisorPath()` finds the built one. */
  readonly executable: string;
  /** Held by the helper while it may still resume anything; one per state folder. */
  readonly lockPath: string;
  /** Where the helper appends what it did after a death; `takeReport` reads it. */
  readonly reportPath: string;
  readonly clock: Clock;
  /** Told of each unexpected end of the helper; it is started again. */
  readonly onRestart?: (failure: SupervisorError) => void;
}

export interface SupervisorError extends FailureDetail {
  readonly kind: 'supervisor-unavailable';
}

type Helper = ChildProcessByStdio<Writable, Readable, null>;

/** A predecessor's helper lets go within about a second, or in 30 s where a VMM hangs. */
const readyMsMax: Millis = millis(40_000);
const restartMs: Millis = millis(100);

const unavailable = (why: string): SupervisorError => ({
  kind: 'supervisor-unavailable',
  message: `the supervisor is not there: ${why}`,
});

/** The supervisor of this build. Throws where it was not built. */
export function supervisorPath(): string {
  for (let at = import.meta.dirname; dirname(at) !== at; at = dirname(at)) {
    const candidate = join(at, 'build', 'Release', 'varve-supervisor');
    if (existsSync(candidate)) return candidate;
  }
  throw new Error('varve-supervisor is not built: run npm run native:build');
}

export class Supervisor implements AsyncDisposable {
  readonly #options: SupervisorOptions;
  readonly #paused = new Map<VmId, { readonly key: number; readonly vm: SupervisedVm }>();
  readonly #closing = new AbortController();
  #nextKey = 1;
  /** The helper once it is ready; rejects never. */
  #ready: Promise<Result<Helper, SupervisorError>>;
  #helper: Helper | null = null;
  /** The helper while it is ready. */
  #live: Helper | null = null;

  private constructor(options: SupervisorOptions) {
    this.#options = options;
    this.#ready = this.#launch();
  }

  /** Resolves when the helper watches: after a crash, once the previous one has finished. */
  static async start(options: SupervisorOptions): Promise<Result<Supervisor, SupervisorError>> {
    const supervisor = new Supervisor(options);
    const ready = await supervisor.#ready;
    if (ready.ok) return ok(supervisor);
    await supervisor.close();
    return err(ready.error);
  }

  /** The helper's process id; null while it is being started again. */
  get pid(): number | null {
    return this.#helper?.pid ?? null;
  }

  /**
   * Before a pause is sent. The line is in the kernel when this returns, if the helper is ready; where
   * it is being started again, once the promise resolves.
   */
  async paused(vm: SupervisedVm): Promise<Result<void, SupervisorError>> {
    assert(vm.socketPath.startsWith('/'), 'the socket path is absolute');
    assert(!/[\n\0]/.test(vm.socketPath), 'a socket path is one line');
    const key = this.#paused.get(vm.vmId)?.key ?? this.#nextKey++;
    this.#paused.set(vm.vmId, { key, vm });
    const told = await this.#tell(pausedLine(key, vm));
    if (!told.ok) this.#paused.delete(vm.vmId);
    return told;
  }

  /** After the resume was answered, or the VM is gone. */
  async resumed(vmId: VmId): Promise<Result<void, SupervisorError>> {
    const known = this.#paused.get(vmId);
    if (known === undefined) return ok(undefined);
    this.#paused.delete(vmId);
    return this.#tell(`resumed ${known.key}\n`);
  }

  /** The helper resumes what is still marked as paused, and ends. */
  async close(): Promise<void> {
    this.#closing.abort();
    const helper = this.#helper;
    if (helper === null) return;
    helper.ref();
    helper.stdin.end();
    await ended(helper);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  /** Writes before it returns where the helper is ready: a caller need not wait to be safe. */
  #tell(line: string): Promise<Result<void, SupervisorError>> {
    const live = this.#live;
    return this.#told(live === null ? null : { live, written: write(live, line) }, line);
  }

  async #told(
    first: { readonly live: Helper; readonly written: Promise<boolean> } | null,
    line: string,
  ): Promise<Result<void, SupervisorError>> {
    if (first === null) {
      const ready = await this.#ready;
      return ready.ok
        ? this.#told({ live: ready.value, written: write(ready.value, line) }, line)
        : ready;
    }
    if ((await first.written) || this.#closing.signal.aborted) return ok(undefined);
    // The helper ended meanwhile; the next one is told of every paused VM as it starts.
    await ended(first.live);
    const again = await this.#ready;
    return again.ok ? ok(undefined) : err(again.error);
  }

  #launch(): Promise<Result<Helper, SupervisorError>> {
    const { executable, lockPath, reportPath } = this.#options;
    const helper = spawn(executable, ['--lock', lockPath, '--report', reportPath], {
      detached: true,
      stdio: ['pipe', 'pipe', 'inherit'],
    });
    this.#helper = helper;
    // Write errors are seen by write(); without a listener they would end this process.
    helper.stdin.on('error', () => undefined);
    helper.unref();
    const ready = untilReady(helper);
    const told = ready.then(async (outcome) => {
      if (!outcome.ok) return outcome;
      const lines = [...this.#paused.values()].map(({ key, vm }) => pausedLine(key, vm));
      const written = lines.length === 0 || write(helper, lines.join(''));
      this.#live = helper;
      await written;
      return ok(helper);
    });
    void told.then((outcome) => {
      if (outcome.ok) helper.once('exit', (code, signal) => this.#replace(code, signal));
    });
    return told;
  }

  /** The helper ended although this process lives. */
  #replace(code: number | null, signal: NodeJS.Signals | null): void {
    this.#helper = null;
    this.#live = null;
    if (this.#closing.signal.aborted) return;
    this.#options.onRestart?.(unavailable(`it ended with ${signal ?? `status ${code ?? '?'}`}`));
    this.#ready = this.#launchAgain();
  }

  async #launchAgain(): Promise<Result<Helper, SupervisorError>> {
    for (;;) {
      const outcome = await this.#launch();
      if (outcome.ok || this.#closing.signal.aborted) return outcome;
      this.#options.onRestart?.(outcome.error);
      try {
        await this.#options.clock.sleep(restartMs, this.#closing.signal);
      } catch {
        return outcome;
      }
    }
  }
}

const pausedLine = (key: number, vm: SupervisedVm): string =>
  `paused ${key} ${vm.pid} ${vm.startTimeTicks} ${vm.socketPath}\n`;

async function ended(helper: Helper): Promise<void> {
  if (helper.pid === undefined || helper.exitCode !== null || helper.signalCode !== null) return;
  await once(helper, 'exit');
}

/** True once the kernel has the bytes; false where the helper has ended. */
function write(helper: Helper, text: string): Promise<boolean> {
  return new Promise((resolve) => {
    helper.stdin.write(text, (error) => resolve(error === undefined || error === null));
  });
}

function untilReady(helper: Helper): Promise<Result<Helper, SupervisorError>> {
  return new Promise((resolve) => {
    const end = (why: string): void => settle(err(unavailable(why)));
    const onExit = (code: number | null): void => end(`it ended with status ${code ?? '?'}`);
    const onError = (error: Error): void => end(error.message);
    const onData = (): void => settle(ok(helper));
    const timer = setTimeout(() => {
      helper.kill('SIGKILL');
      end('an earlier one still holds its lock');
    }, readyMsMax);
    const settle = (outcome: Result<Helper, SupervisorError>): void => {
      clearTimeout(timer);
      helper.off('exit', onExit);
      helper.stdout.off('data', onData);
      helper.stdout.resume();
      resolve(outcome);
    };
    helper.once('exit', onExit);
    helper.on('error', onError);
    helper.stdout.once('data', onData);
  });
}
