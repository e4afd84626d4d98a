/** A real daemon in its own process, for benches: what is measured is what users run. */
import { spawn, type ChildProcess } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { stringify } from 'smol-toml';
import type { CaptureRequest, CaptureView, VmView } from '../src/capture/types.ts';
import { Client } from '../src/cli/client.ts';
import { launchMiniVm, type LaunchOptions, type MiniVm } from '../src/minivm/launch.ts';

export const projectRoot: string = new URL(
  import.meta.url.includes('/dist/') ? '../..' : '..',
  import.meta.url,
).pathname;

export class BenchDaemon implements AsyncDisposable {
  readonly folder: string;
  readonly #child: ChildProcess;
  readonly #client: Client;
  #vms = 0;

  private constructor(folder: string, child: ChildProcess) {
    this.folder = folder;
    this.#child = child;
    const socketPath = join(folder, 'varve.sock');
    const endpoint = { text: `unix:${socketPath}`, options: { socketPath }, secure: false };
    this.#client = new Client(endpoint, undefined);
  }

  /** @param sections sections of the configuration beside paths and server */
  static async start(sections: Record<string, unknown> = {}): Promise<BenchDaemon> {
    const folder = mkdtempSync(join(process.env['BENCH_DIR'] ?? tmpdir(), 'varve-bench-'));
    const file = join(folder, 'varve.toml');
    const config = {
      server: { listen: 'off', socket: join(folder, 'varve.sock') },
      paths: { state: join(folder, 'state'), socket_roots: [folder] },
      observability: { log_level: 'info' },
      ...sections,
    };
    writeFileSync(file, stringify(config));
    const command = join(projectRoot, 'bin', 'varve');
    const child = spawn(process.execPath, [command, '--config', file, 'serve'], {
      stdio: ['ignore', 'pipe', 'inherit'],
    });
    for await (const line of createInterface({ input: child.stdout })) {
      if (line.includes('"serving"')) break;
    }
    child.stdout.resume();
    return new BenchDaemon(folder, child);
  }

  /** A field of /proc/<pid>/status in bytes, such as VmHWM. */
  memoryBytes(field: 'VmHWM' | 'VmRSS'): number {
    const status = readFileSync(`/proc/${this.#child.pid}/status`, 'utf8');
    const found = new RegExp(`^${field}:\\s+(\\d+) kB$`, 'm').exec(status);
    return Number(found?.[1] ?? 'NaN') * 1024;
  }

  /** Forgets the peak so far (writing 5 to clear_refs resets VmHWM). */
  resetPeak(): void {
    writeFileSync(`/proc/${this.#child.pid}/clear_refs`, '5');
  }

  vm(options: LaunchOptions): Promise<MiniVm> {
    const id = `bench-${++this.#vms}`;
    return launchMiniVm({ id, socketPath: join(this.folder, `${id}.sock`), ...options });
  }

  attach(vm: MiniVm, trackingMode: VmView['trackingMode'] = 'dirty'): Promise<VmView> {
    const body = { socketPath: vm.socketPath, trackingMode };
    return this.#client.call<VmView>('POST', '/v1/vms', body);
  }

  startCapture(vmId: string, request: CaptureRequest = {}): Promise<CaptureView> {
    return this.#client.call<CaptureView>('POST', `/v1/vms/${vmId}/captures`, request);
  }

  /** Captures, and follows its events to the end. */
  async capture(vmId: string, request: CaptureRequest = {}): Promise<CaptureView> {
    const { captureId } = await this.startCapture(vmId, request);
    for await (const event of this.#client.events(`/v1/captures/${captureId}/events`)) void event;
    const view = await this.#client.call<CaptureView>('GET', `/v1/captures/${captureId}`);
    if (view.status !== 'published') throw new Error(`capture failed: ${JSON.stringify(view)}`);
    return view;
  }

  health(): Promise<unknown> {
    return this.#client.call('GET', '/healthz');
  }

  async [Symbol.asyncDispose](): Promise<void> {
    const ended = once(this.#child, 'exit');
    this.#child.kill('SIGTERM');
    await ended;
    rmSync(this.folder, { recursive: true, force: true });
  }
}
