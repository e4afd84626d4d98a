/** The real daemon, `varve serve` in a process of its own, in a temporary folder; to be killed. */
import { spawn } from 'node:child_process';
import type { ChildProcess } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { request } from 'node:http';
import type { IncomingMessage } from 'node:http';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { FileArtifactStore } from '../../src/artifact/file-store.ts';
import type { CaptureView, Dialect, ForkView, VmView } from '../../src/capture/types.ts';
import type { CrashPoint } from '../../src/crash-points.ts';
import { openCatalog } from '../../src/catalog/open.ts';
import { loadConfig } from '../../src/config/load.ts';
import { launchMiniVm } from '../../src/minivm/launch.ts';
import type { LaunchOptions, MiniVm } from '../../src/minivm/launch.ts';
import { materialise } from '../../src/restore/materialise.ts';
import type { Materialised } from '../../src/restore/materialise.ts';
import { directHolds } from '../../src/restore/restore-hold.ts';
import { nodeId } from '../../src/units.ts';
import { mustOk } from './fixtures.ts';

export interface Answer {
  readonly status: number;
  readonly body: unknown;
}

/** One server-sent event of a capture. */
export interface SentEvent {
  readonly event: string;
  readonly data: unknown;
}

const logCharactersMax = 200_000;

export class Daemon implements AsyncDisposable {
  readonly folder: string;
  readonly socketPath: string;
  readonly configPath: string;
  #child: ChildProcess | null = null;
  #log = '';

  /** @param settings TOML after the `[paths]`, `[server]` and `[node]` tables */
  constructor(folder: string, settings = '') {
    this.folder = folder;
    this.socketPath = join(folder, 'varve.sock');
    this.configPath = join(folder, 'varve.toml');
    writeFileSync(
      this.configPath,
      `[paths]\nstate = "${join(folder, 'state')}"\nsocket_roots = ["${folder}"]\n` +
        `[server]\nlisten = "off"\nsocket = "${this.socketPath}"\n[node]\nid = "test"\n${settings}`,
    );
  }

  /** The last one started. */
  get pid(): number {
    const pid = this.#child?.pid;
    if (pid === undefined) throw new Error('the daemon does not run');
    return pid;
  }

  /** The end of what it said. */
  get log(): string {
    return this.#log;
  }

  get alive(): boolean {
    const child = this.#child;
    return child !== null && child.exitCode === null && child.signalCode === null;
  }

  get #crashFile(): string {
    return join(this.folder, 'crash-at');
  }

  /** It dies as soon as it passes this point, once: the next start takes it back. */
  crashAt(point: CrashPoint): void {
    writeFileSync(this.#crashFile, point);
  }

  /** Resolves when it serves: after recovery. */
  async start(): Promise<void> {
    rmSync(this.#crashFile, { force: true });
    const program = join(process.cwd(), 'bin/varve');
    const env = { ...process.env, VARVE_CRASH_FILE: this.#crashFile };
    const child = spawn(process.execPath, [program, 'serve', '--config', this.configPath], {
      stdio: ['ignore', 'pipe', 'pipe'],
      env,
    });
    this.#child = child;
    const serving = new Promise<void>((resolve, reject) => {
      for (const input of [child.stdout, child.stderr]) {
        createInterface({ input }).on('line', (line) => {
          this.#log = `${this.#log}${line}\n`.slice(-logCharactersMax);
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

  /** Resolves with the signal that ended it. */
  async exited(): Promise<NodeJS.Signals | null> {
    const child = this.#child;
    if (child === null) return null;
    if (child.exitCode === null && child.signalCode === null) await once(child, 'exit');
    return child.signalCode;
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

  async vms(): Promise<readonly VmView[]> {
    return (await this.#expect<{ vms: readonly VmView[] }>('GET', '/v1/vms')).vms;
  }

  async detach(vm: string): Promise<void> {
    await this.#expect('DELETE', `/v1/vms/${vm}`);
  }

  startCapture(vm: string, body: Record<string, unknown> = {}): Promise<CaptureView> {
    return this.#expect('POST', `/v1/vms/${vm}/captures`, body);
  }

  /** Newest first. */
  async captures(): Promise<readonly CaptureView[]> {
    const all = await this.#expect<{ captures: readonly CaptureView[] }>('GET', '/v1/captures');
    return all.captures;
  }

  fork(vm: string, body: Record<string, unknown>): Promise<ForkView> {
    return this.#expect('POST', `/v1/vms/${vm}/forks`, body);
  }

  show(capture: string): Promise<CaptureView> {
    return this.#expect('GET', `/v1/captures/${capture}`);
  }

  /** A capture's events as they come. Fails when the daemon dies. */
  async *events(capture: string): AsyncGenerator<SentEvent> {
    const { socketPath } = this;
    const path = `/v1/captures/${capture}/events`;
    const answer = await new Promise<IncomingMessage>((resolve, reject) => {
      request({ socketPath, path, agent: false }, resolve).once('error', reject).end();
    });
    // Also when nobody reads any more.
    answer.on('error', () => undefined);
    let event = '';
    let rest = '';
    for await (const piece of answer) {
      const lines = `${rest}${String(piece)}`.split('\n');
      rest = lines.pop() ?? '';
      for (const line of lines) {
        if (line.startsWith('event: ')) event = line.slice('event: '.length);
        if (!line.startsWith('data: ')) continue;
        yield { event, data: JSON.parse(line.slice('data: '.length)) };
      }
    }
  }

  /** Follows its events to the end. Rejects when the daemon dies. */
  async ended(capture: string): Promise<CaptureView> {
    for await (const event of this.events(capture)) void event;
    return this.show(capture);
  }
}

/** Rebuilds a snapshot's files from the daemon's folders, whether or not it runs. */
export async function rebuild(daemon: Daemon, snapshot: string): Promise<Materialised> {
  const config = mustOk(loadConfig({ path: daemon.configPath }));
  const catalog = mustOk(await openCatalog({ url: config.catalog.url }));
  try {
    const store = mustOk(
      await FileArtifactStore.open({
        root: config.paths.artifacts,
        node: nodeId(config.node.id),
      }),
    );
    const folder = mkdtempSync(join(daemon.folder, 'restore-'));
    const { signal } = new AbortController();
    const holds = directHolds(catalog, (hold, error) => {
      throw new Error(`hold ${hold}: ${error.message}`);
    });
    const deps = { catalog, store, nodeId: nodeId('test'), holds };
    return await materialise(deps, { snapshot, folder, signal });
  } finally {
    await catalog.close();
  }
}

/** Restores a snapshot into a fresh small VM, paused. */
export async function restoreInto(
  daemon: Daemon,
  snapshot: string,
  dialect: Dialect,
  options: LaunchOptions & { readonly track?: boolean } = {},
): Promise<MiniVm> {
  const { memoryPath, vmStatePath } = await rebuild(daemon, snapshot);
  if (vmStatePath === null) throw new Error('the snapshot has no VM state');
  const restore = { memoryPath, snapshotPath: vmStatePath, track: options.track ?? true };
  const socketPath = join(memoryPath, '..', 'vm.sock');
  return launchMiniVm({ socketPath, dialect, ...options, restore });
}

/** Hashes of all pages of a small VM. */
export async function allHashes(vm: MiniVm): Promise<BigUint64Array> {
  const { regions } = await vm.info();
  return vm.hashes(0, regions.reduce((sum, region) => sum + region.bytes, 0) / 4096);
}
