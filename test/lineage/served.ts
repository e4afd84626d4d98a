/** The real daemon, `varve serve` in a process of its own, in a temporary folder; to be killed. */
import { spawn } from 'node:child_process';
import type { ChildProcess } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, writeFileSync } from 'node:fs';
import { request } from 'node:http';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { FileArtifactStore } from '../../src/artifact/file-store.ts';
import type { CaptureView, Dialect, VmView } from '../../src/capture/types.ts';
import { openCatalog } from '../../src/catalog/open.ts';
import { parseConfig } from '../../src/config/load.ts';
import { launchMiniVm } from '../../src/minivm/launch.ts';
import type { MiniVm } from '../../src/minivm/launch.ts';
import { materialise } from '../../src/restore/materialise.ts';
import { mustOk } from './fixtures.ts';

export interface Answer {
  readonly status: number;
  readonly body: unknown;
}

export class Daemon implements AsyncDisposable {
  readonly folder: string;
  readonly socketPath: string;
  readonly #configPath: string;
  #child: ChildProcess | null = null;
  #log = '';

  /** @param settings TOML after the `[paths]`, `[server]` and `[node]` tables */
  constructor(folder: string, settings = '') {
    this.folder = folder;
    this.socketPath = join(folder, 'varve.sock');
    this.#configPath = join(folder, 'varve.toml');
    writeFileSync(
      this.#configPath,
      `[paths]\nstate = "${join(folder, 'state')}"\nsocket_roots = ["${folder}"]\n` +
        `[server]\nlisten = "off"\nsocket = "${this.socketPath}"\n[node]\nid = "test"\n${settings}`,
    );
  }

  get log(): string {
    return this.#log;
  }

  /** Resolves when it serves: after recovery. */
  async start(): Promise<void> {
    const program = join(process.cwd(), 'bin/varve');
    const child = spawn(process.execPath, [program, 'serve', '--config', this.#configPath], {
      stdio: ['ignore', 'pipe', 'pipe'],
    });
    this.#child = child;
    const serving = new Promise<void>((resolve, reject) => {
      for (const input of [child.stdout, child.stderr]) {
        createInterface({ input }).on('line', (line) => {
          this.#log += `${line}\n`;
          if (line.includes('"serving"')) resolve();
        });
      }
      child.once('exit', () => reject(new Error(`the daemon ended: ${this.#log}`)));
    });
    await serving;
  }

  async kill(signal: NodeJS.Signals = 'SIGKILL'): Promise<void> {
    const child = this.#child;
    this.#child = null;
    if (child === null || child.exitCode !== null || child.signalCode !== null) return;
    const exit = once(child, 'exit');
    child.kill(signal);
    await exit;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.kill();
  }

  async send(method: string, path: string, body?: unknown): Promise<Answer> {
    const { status, text } = await this.#raw(method, path, body);
    return { status, body: text === '' ? null : JSON.parse(text) };
  }

  /** An answer that is no JSON. */
  async text(path: string): Promise<string> {
    return (await this.#raw('GET', path)).text;
  }

  #raw(method: string, path: string, body?: unknown): Promise<{ status: number; text: string }> {
    return new Promise((resolve, reject) => {
      const { socketPath } = this;
      const headers = body === undefined ? {} : { 'content-type': 'application/json' };
      const sent = request({ socketPath, method, path, headers, agent: false }, (answer) => {
        const pieces: Buffer[] = [];
        answer.on('data', (piece: Buffer) => pieces.push(piece));
        answer.on('error', reject);
        answer.on('end', () => {
          const text = Buffer.concat(pieces).toString();
          resolve({ status: answer.statusCode ?? 0, text });
        });
      });
      sent.on('error', reject);
      sent.end(body === undefined ? undefined : JSON.stringify(body));
    });
  }

  async #expect<T>(method: string, path: string, body?: unknown): Promise<T> {
    const answer = await this.send(method, path, body);
    if (answer.status >= 300) throw new Error(`${method} ${path}: ${JSON.stringify(answer)}`);
    return answer.body as T;
  }

  attach(body: Record<string, unknown>): Promise<VmView> {
    return this.#expect('POST', '/v1/vms', body);
  }

  startCapture(vm: string, body: Record<string, unknown> = {}): Promise<CaptureView> {
    return this.#expect('POST', `/v1/vms/${vm}/captures`, body);
  }

  show(capture: string): Promise<CaptureView> {
    return this.#expect('GET', `/v1/captures/${capture}`);
  }

  /** Follows its events to the end. Rejects when the daemon dies. */
  async ended(capture: string): Promise<CaptureView> {
    const { socketPath } = this;
    await new Promise<void>((resolve, reject) => {
      const path = `/v1/captures/${capture}/events`;
      const sent = request({ socketPath, path, agent: false }, (answer) => {
        answer.resume().once('end', resolve).once('error', reject);
      });
      sent.once('error', reject).end();
    });
    return this.show(capture);
  }
}

/** Restores a snapshot of a stopped daemon into a fresh small VM, paused. */
export async function restoreInto(
  daemon: Daemon,
  snapshot: string,
  dialect: Dialect,
): Promise<MiniVm> {
  const state = join(daemon.folder, 'state');
  const input = { paths: { state, socket_roots: [daemon.folder] } };
  const config = mustOk(parseConfig(input, 'the test'));
  const catalog = mustOk(await openCatalog({ url: config.catalog.url }));
  try {
    const store = mustOk(await FileArtifactStore.open({ root: config.paths.artifacts }));
    const folder = mkdtempSync(join(daemon.folder, 'restore-'));
    const { signal } = new AbortController();
    const files = await materialise({ catalog, store }, { snapshot, folder, signal });
    if (files.vmStatePath === null) throw new Error('the snapshot has no VM state');
    const restore = { memoryPath: files.memoryPath, snapshotPath: files.vmStatePath };
    const socketPath = join(folder, 'vm.sock');
    return await launchMiniVm({ socketPath, dialect, restore, backend: 'thread' });
  } finally {
    await catalog.close();
  }
}

/** Hashes of all pages of a small VM. */
export async function allHashes(vm: MiniVm): Promise<BigUint64Array> {
  const { regions } = await vm.info();
  return vm.hashes(0, regions.reduce((sum, region) => sum + region.bytes, 0) / 4096);
}
