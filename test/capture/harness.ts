/** A whole daemon's worth of parts, real ones, in a fresh folder; and the small VMs it captures. */
import { mkdir, mkdtemp, readdir, readFile, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { expect } from 'vitest';
import { FileArtifactStore } from '../../src/artifact/file-store.ts';
import { decodeManifest } from '../../src/artifact/manifest.ts';
import type { Catalog } from '../../src/catalog/catalog.ts';
import { openCatalog, type OpenCatalog } from '../../src/catalog/open.ts';
import { Engine } from '../../src/capture/engine.ts';
import { silentObserver, type CaptureObserver } from '../../src/capture/observer.ts';
import { CaptureService } from '../../src/capture/service.ts';
import type { CaptureRequest, CaptureView, VmView } from '../../src/capture/types.ts';
import { systemClock } from '../../src/clock.ts';
import { parseConfig, type Config } from '../../src/config/load.ts';
import { NodeDb } from '../../src/lineage/node-db.ts';
import { launchMiniVm, type LaunchOptions, type MiniVm } from '../../src/minivm/launch.ts';
import { Cleanups } from '../../src/pipeline/cleanups.ts';
import {
  materialise,
  type Materialised,
  type MaterialiseDeps,
} from '../../src/restore/materialise.ts';
import { directHolds } from '../../src/restore/restore-hold.ts';
import { bytes, nodeId, type VmId } from '../../src/units.ts';

export const never: AbortSignal = new AbortController().signal;

export interface Warning {
  readonly what: string;
  readonly facts: Readonly<Record<string, unknown>>;
}

export interface HarnessHooks {
  /** Every statement that the catalog runs. */
  readonly onStatement?: (sql: string) => void;
  /** Stands between the captures and the catalog; may wait, or fail a call. */
  readonly around?: (catalog: OpenCatalog) => Catalog;
  /** A folder of VMs beside its own. */
  readonly socketRoot?: string;
}

export class Harness implements AsyncDisposable {
  readonly #hooks: HarnessHooks;
  readonly folder: string;
  readonly config: Config;
  readonly warnings: Warning[] = [];
  readonly pausedNow = new Set<string>();
  service!: CaptureService;
  catalog!: OpenCatalog;
  nodeDb!: NodeDb;
  store!: FileArtifactStore;
  #cleanups = new Cleanups();
  #vms = 0;

  private constructor(folder: string, config: Config, hooks: HarnessHooks) {
    this.#hooks = hooks;
    this.folder = folder;
    this.config = config;
  }

  /** @param overrides sections of the config file, as written there */
  static async make(
    overrides: Record<string, unknown> = {},
    observer: Partial<CaptureObserver> = {},
    hooks: HarnessHooks = {},
  ): Promise<Harness> {
    const folder = await mkdtemp(join(tmpdir(), 'varve-capture-'));
    const input = {
      pipeline: { slab_budget: '32MiB', slab_bytes: '1MiB', coalesce: { batch_bytes: '1MiB' } },
      ...overrides,
      paths: {
        state: join(folder, 'state'),
        socket_roots: [folder, ...[hooks.socketRoot ?? []].flat()],
      },
    };
    const parsed = valueOf(parseConfig(input, 'the test'));
    const harness = new Harness(folder, parsed, hooks);
    await harness.start(observer);
    return harness;
  }

  /** Starts the parts, as a daemon does; again after `stop`. */
  async start(observer: Partial<CaptureObserver> = {}): Promise<void> {
    const { config } = this;
    await mkdir(config.paths.state, { recursive: true });
    const cleanups = new Cleanups();
    this.#cleanups = cleanups;
    this.nodeDb = valueOf(NodeDb.open(join(config.paths.state, 'node.db'), systemClock));
    cleanups.defer(() => this.nodeDb.close());
    this.catalog = valueOf(
      await openCatalog({
        url: config.catalog.url,
        onStatement: ({ sql }) => this.#hooks.onStatement?.(sql),
      }),
    );
    cleanups.defer(() => this.catalog.close());
    const id = nodeId('test-node');
    valueOf(await this.catalog.registerNode({ nodeId: id }));
    this.store = valueOf(
      await FileArtifactStore.open({
        root: config.paths.artifacts,
        node: nodeId(config.node.id),
      }),
    );
    const engine = new Engine(config, silentObserver);
    cleanups.useAsync(engine);
    this.service = await CaptureService.start({
      config,
      clock: systemClock,
      nodeDb: this.nodeDb,
      catalog: this.#hooks.around?.(this.catalog) ?? this.catalog,
      store: this.store,
      engine,
      nodeId: id,
      observer: {
        ...silentObserver,
        warn: (what, facts) => this.warnings.push({ what, facts }),
        ...observer,
      },
      supervisor: {
        paused: (vm) => this.pausedNow.add(vm.vmId),
        resumed: (vm) => this.pausedNow.delete(vm.vmId),
      },
    });
    cleanups.defer(() => this.service.close());
  }

  async stop(): Promise<void> {
    await this.#cleanups[Symbol.asyncDispose]();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.stop();
    await rm(this.folder, { recursive: true, force: true });
  }

  /** A small VM under the allowed socket root. */
  vm(options: LaunchOptions = {}): Promise<MiniVm> {
    const id = `vm-${++this.#vms}`;
    return launchMiniVm({ id, socketPath: join(this.folder, `${id}.sock`), ...options });
  }

  async attach(
    vm: MiniVm,
    options: { trackingMode?: VmView['trackingMode']; launchParent?: string } = {},
  ): Promise<VmView> {
    return valueOf(await this.service.attach({ socketPath: vm.socketPath, ...options } as never));
  }

  async startCapture(id: VmId, request: CaptureRequest = {}): Promise<CaptureView> {
    return valueOf(await this.service.startCapture(id, request));
  }

  /** Captures and waits for the end, whatever it is. */
  async capture(id: VmId, request: CaptureRequest = {}): Promise<CaptureView> {
    const started = await this.startCapture(id, request);
    return this.service.waitFor(started.captureId, never);
  }

  /** Captures, and insists that it is published. */
  async published(
    id: VmId,
    request: CaptureRequest = {},
  ): Promise<NonNullable<CaptureView['result']>> {
    const view = await this.capture(id, request);
    expect(view.failure).toBeNull();
    expect(view.status).toBe('published');
    if (view.result === null) throw new Error('a published capture has a result');
    return view.result;
  }

  /** The memory that a snapshot restores to. Much cheaper than a VM that loads it. */
  async memoryOf(snapshot: string): Promise<Buffer> {
    const { memoryPath } = await this.#materialise(snapshot);
    const memory = await readFile(memoryPath);
    await rm(memoryPath);
    return memory;
  }

  async #materialise(snapshot: string): Promise<Materialised> {
    const folder = await mkdtemp(join(this.folder, 'restore-'));
    return materialise(this.restores, { snapshot, folder, signal: never });
  }

  /** What a restore by another process reads with. */
  get restores(): MaterialiseDeps {
    const { catalog, store } = this;
    const holds = directHolds(catalog, (_hold, error) => expect.fail(error.message));
    return { catalog, store, nodeId: nodeId('test-node'), holds };
  }

  /** Restores a snapshot into a fresh small VM, paused. */
  async restore(snapshot: string, options: LaunchOptions = {}): Promise<MiniVm> {
    const files = await this.#materialise(snapshot);
    if (files.vmStatePath === null) throw new Error('the snapshot has no VM state');
    const { memoryPath, vmStatePath } = files;
    return this.vm({ ...options, restore: { memoryPath, snapshotPath: vmStatePath } });
  }

  /** Files of layers and staging folders that exist now. */
  async leftovers(): Promise<{ layers: string[]; staging: string[] }> {
    return {
      layers: (await readdir(this.config.paths.layers)).sort(),
      staging: (await readdir(this.config.paths.staging)).sort(),
    };
  }
}

export function valueOf<T>(result: { ok: true; value: T } | { ok: false; error: unknown }): T {
  if (!result.ok) throw new Error(JSON.stringify(result.error));
  return result.value;
}

/** Hashes of every page of a VM. */
export async function allHashes(vm: MiniVm): Promise<BigUint64Array> {
  const info = await vm.info();
  const pages = info.regions.reduce((sum, region) => sum + region.bytes, 0) / 4096;
  return vm.hashes(0, pages);
}

/** All bytes of a VM's memory. */
export async function allBytes(vm: MiniVm): Promise<Buffer> {
  const { regions } = await vm.info();
  return vm.readBytes(
    0,
    regions.reduce((sum, region) => sum + region.bytes, 0),
  );
}

/** Index of the first page of two images that differs, or null. */
export function firstDifferingPage(a: Buffer, b: Buffer): number | null {
  if (a.length !== b.length) return Math.floor(Math.min(a.length, b.length) / 4096);
  if (a.equals(b)) return null;
  let page = 0;
  while (a.compare(b, page * 4096, (page + 1) * 4096, page * 4096, (page + 1) * 4096) === 0) page++;
  return page;
}

/** Index of the first page that differs, or null. */
export function firstDifference(a: BigUint64Array, b: BigUint64Array): number | null {
  if (a.length !== b.length) return Math.min(a.length, b.length);
  const at = a.findIndex((hash, page) => hash !== b[page]);
  return at < 0 ? null : at;
}

/** How many objects are in its store. */
export async function objects(harness: Harness): Promise<number> {
  let count = 0;
  for await (const object of harness.store.list(never)) count += object.key === null ? 0 : 1;
  return count;
}

/** Every object that the manifest of a snapshot names is in the store. */
export async function expectWholeManifest(harness: Harness, snapshot: string): Promise<void> {
  const { content } = valueOf(await harness.catalog.resolve(snapshot));
  const read = await harness.store.readAll(content.manifest, bytes(1 << 20), never);
  const manifest = valueOf(decodeManifest(valueOf(read), content.manifest.key));
  for (const { artifact } of manifest.memory.layers) {
    valueOf(await harness.store.head(artifact as never));
  }
}

/** Gives its turn away until it is so; the test's own time limit ends it. */
export async function until(isSo: () => boolean | Promise<boolean>): Promise<void> {
  while (!(await isSo())) await new Promise((resolve) => setImmediate(resolve));
}
