/** A real daemon in its own process, for benches: what is measured is what users run. */
import { spawn, type ChildProcess } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, readdirSync, readFileSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { get } from 'node:http';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { stringify } from 'smol-toml';
import { FileArtifactStore } from '../src/artifact/file-store.ts';
import type { CaptureRequest, CaptureView, VmView } from '../src/capture/types.ts';
import { openCatalog } from '../src/catalog/open.ts';
import { Client } from '../src/cli/client.ts';
import { valueOf } from '../src/cli/parts.ts';
import { launchMiniVm, type LaunchOptions, type MiniVm } from '../src/minivm/launch.ts';
import { materialise } from '../src/restore/materialise.ts';
import { directHolds } from '../src/restore/restore-hold.ts';
import { nodeId } from '../src/units.ts';

export const projectRoot: string = new URL(
  import.meta.url.includes('/dist/') ? '../..' : '..',
  import.meta.url,
).pathname;

export interface Restored {
  readonly folder: string;
  /** From the request to the files, every byte checked against its digest. */
  readonly tookMs: number;
  readonly memoryPath: string;
  readonly vmStatePath: string;
}

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

  /**
   * @param sections sections of the configuration beside paths and server
   * @param paths keys of `paths` beside the state and the socket roots
   */
  static async start(
    sections: Record<string, unknown> = {},
    paths: Record<string, unknown> = {},
  ): Promise<BenchDaemon> {
    const folder = mkdtempSync(join(process.env['BENCH_DIR'] ?? tmpdir(), 'varve-bench-'));
    const file = join(folder, 'varve.toml');
    const config = {
      server: { listen: 'off', socket: join(folder, 'varve.sock') },
      paths: { state: join(folder, 'state'), socket_roots: [folder], ...paths },
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

  /** @param launchParent the snapshot that the VM was restored from */
  attach(
    vm: MiniVm,
    trackingMode: VmView['trackingMode'] = 'dirty',
    launchParent?: string,
  ): Promise<VmView> {
    const body = { socketPath: vm.socketPath, trackingMode, launchParent };
    return this.#client.call<VmView>('POST', '/v1/vms', body);
  }

  /** A VM that somebody else started, not booted yet: its tracking is turned on. */
  attachSocket(socketPath: string, vmId: string): Promise<VmView> {
    return this.#client.call<VmView>('POST', '/v1/vms', {
      socketPath,
      vmId,
      trackingMode: 'dirty',
    });
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

  async chainDepth(vmId: string): Promise<number> {
    return (await this.#client.call<VmView>('GET', `/v1/vms/${vmId}`)).chainDepth;
  }

  /** Sum of a metric's samples, whatever their labels. */
  async metric(name: string): Promise<number> {
    const text = await new Promise<string>((resolve, reject) => {
      const socketPath = join(this.folder, 'varve.sock');
      get({ socketPath, path: '/metrics' }, (answer) => {
        let body = '';
        answer.setEncoding('utf8').on('data', (chunk: string) => (body += chunk));
        answer.on('end', () => resolve(body)).on('error', reject);
      }).on('error', reject);
    });
    const samples = text.matchAll(new RegExp(`^${name}(?:\\{[^}]*\\})? (\\S+)$`, 'gm'));
    return [...samples].reduce((sum, [, value]) => sum + Number(value), 0);
  }

  /** Bytes on disk of a folder of the state, a file with several names counted once. */
  diskBytes(name: 'layers' | 'artifacts'): number {
    const seen = new Map<number, number>();
    const options = { recursive: true, withFileTypes: true } as const;
    for (const entry of readdirSync(join(this.folder, 'state', name), options)) {
      if (!entry.isFile()) continue;
      const file = statSync(join(entry.parentPath, entry.name), { throwIfNoEntry: false });
      if (file !== undefined) seen.set(file.ino, file.blocks * 512);
    }
    return [...seen.values()].reduce((sum, bytes) => sum + bytes, 0);
  }

  /** Makes the files that a VMM restores from, as `materialise` does, from the daemon's own state. */
  async restore(snapshot: string): Promise<Restored> {
    const state = join(this.folder, 'state');
    const catalog = valueOf(await openCatalog({ url: `sqlite:${state}/catalog.db` }));
    try {
      const store = valueOf(
        await FileArtifactStore.open({
          root: join(state, 'artifacts'),
          node: nodeId('bench'),
        }),
      );
      const folder = mkdtempSync(join(this.folder, 'restored-'));
      const signal = new AbortController().signal;
      const holds = directHolds(catalog, (_hold, error) => {
        throw new Error(error.message);
      });
      valueOf(await catalog.registerNode({ nodeId: nodeId('bench') }));
      const began = process.hrtime.bigint();
      const files = await materialise(
        { catalog, store, nodeId: nodeId('bench'), holds },
        { snapshot, folder, signal },
      );
      const tookMs = Number(process.hrtime.bigint() - began) / 1e6;
      return { folder, tookMs, memoryPath: files.memoryPath, vmStatePath: files.vmStatePath ?? '' };
    } finally {
      await catalog.close();
    }
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
