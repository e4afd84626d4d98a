/** One daemon, its small VMs, and what the model knows of them. */
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { readFile, rm } from 'node:fs/promises';
import { spawnSync } from 'node:child_process';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import type { CaptureView, Dialect, TrackingMode } from '../../../src/capture/types.ts';
import { launchMiniVm } from '../../../src/minivm/launch.ts';
import type { MiniVm } from '../../../src/minivm/launch.ts';
import { Daemon, rebuild, restoreInto } from '../served.ts';
import { holdsSettled, leftovers, readNodeState } from './node-state.ts';
import { afterDevice, afterProgram, difference, freshImage, PAGE, zeroPage } from './pages.ts';
import type { Expected, Fill, Image, Random } from './pages.ts';

export const imagePages = 1024;
export const vmsMax = 3;
/** Small, so that chains are compacted often. */
export const maxChain = 5;

export const countNames = [
  'steps',
  'captures',
  'published',
  'aborted',
  'widened',
  'cancels',
  'faults',
  'diskFull',
  'kills',
  'crashes',
  'forks',
  'children',
  'compactions',
  'replaced',
  'restores',
  'pagesCompared',
] as const;
export type Counts = Record<(typeof countNames)[number], number>;
export const noCounts = (): Counts =>
  Object.fromEntries(countNames.map((name) => [name, 0])) as Counts;

export interface ModelVm {
  readonly id: string;
  readonly mini: MiniVm;
  readonly mode: TrackingMode;
  readonly image: Image;
  /** The snapshot its process was started from. */
  readonly launchParent: string | null;
  /** Guest-physical number of the image's page. */
  readonly guestPage: (page: number) => number;
  readonly folder: string | null;
  readonly log: (line: string) => void;
  ownerPaused: boolean;
}

export interface Kept {
  readonly snapshot: string;
  readonly expected: Expected;
}

/** What a capture that runs now will have to read as, should it be published. */
interface InFlight {
  readonly vm: string;
  readonly expected: Expected;
  sawCommitted: string | null;
}

export interface WorldOptions {
  readonly dialect: Dialect;
  readonly random: Random;
  readonly counts: Counts;
  readonly log: (line: string) => void;
  /** One region, no compression, no VMM epochs, advancing: nothing is drawn. */
  readonly plain?: boolean;
}

const twoRegions = [
  { guestAddress: 0n, bytes: (imagePages - 256) * PAGE },
  { guestAddress: 0x1_0000_0000n, bytes: 256 * PAGE },
];

export class World implements AsyncDisposable {
  readonly dialect: Dialect;
  readonly daemon: Daemon;
  readonly folder: string;
  readonly counts: Counts;
  readonly log: (line: string) => void;
  readonly vms: ModelVm[] = [];
  readonly kept: Kept[] = [];
  /** Where layers are on a small disk of their own, so that it can be full. */
  readonly smallDisk: boolean;
  readonly #regions: boolean;
  readonly #epochs: boolean;
  readonly #resolved = new Set<string>();
  readonly #compacted = new Set<string>();
  #inFlight: InFlight | null = null;
  #names = 0;

  constructor(options: WorldOptions) {
    const { random } = options;
    this.dialect = options.dialect;
    this.counts = options.counts;
    this.log = options.log;
    this.folder = mkdtempSync(join(tmpdir(), 'varve-model-'));
    const layers = join(this.folder, 'state/layers');
    mkdirSync(layers, { recursive: true });
    const drawn = options.plain !== true;
    this.smallDisk = drawn && random.chance(0.5) && mountSmallDisk(layers);
    this.#regions = drawn && random.chance(0.5);
    // Of `aenv` with epochs, a VM that wrote nothing since its last one does not say where it is.
    this.#epochs = drawn && options.dialect === 'e2b' && random.chance(0.4);
    const compression = drawn ? random.pick(['none', 'none', 'lz4', 'zstd']) : 'none';
    const advance = !drawn || random.chance(0.85);
    this.daemon = new Daemon(
      this.folder,
      `[memory_snapshot]\ncompression = "${compression}"\n` +
        `[capture]\npause_deadline = "10m"\n[vmm]\nrequest_timeout = "60s"\n` +
        `[pipeline]\nworkers = 2\nslab_budget = "8MiB"\nslab_bytes = "256KiB"\n` +
        `[pipeline.coalesce]\nbatch_bytes = "256KiB"\n` +
        `[pipeline.publish]\nretry_min = "10ms"\n` +
        `[lineage]\nmax_chain = ${maxChain}\nadvance = ${String(advance)}\n`,
    );
    this.log(
      `dialect ${this.dialect}, compression ${compression}, advance ${String(advance)}, ` +
        `two regions ${String(this.#regions)}, VMM epochs ${String(this.#epochs)}, ` +
        `small disk ${String(this.smallDisk)}`,
    );
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.daemon[Symbol.asyncDispose]();
    for (const vm of this.vms) await vm.mini[Symbol.asyncDispose]();
    if (this.smallDisk) spawnSync('umount', ['-l', join(this.folder, 'state/layers')]);
    rmSync(this.folder, { recursive: true, force: true });
  }

  name(): string {
    this.#names += 1;
    return `vm-${this.#names}`;
  }

  vm(id: string): ModelVm {
    const vm = this.vms.find((each) => each.id === id);
    if (vm === undefined) throw new Error(`no VM ${id} in the model`);
    return vm;
  }

  /** A fresh VM, attached. */
  async addVm(random: Random, only?: TrackingMode): Promise<ModelVm> {
    const id = this.name();
    const mode = only ?? random.pick<TrackingMode>(['dirty', 'dirty', 'mincore']);
    const track = mode === 'dirty' || random.chance(0.5);
    // Only this dialect always says where its memory is; of the others, the page tables tell of one
    // region, and what was written of more.
    const told = this.dialect === 'e2b' || (this.dialect === 'firecracker' && mode === 'dirty');
    const regions = this.#regions && told;
    const mini = await launchMiniVm({
      ...{ id, dialect: this.dialect, memoryMib: (imagePages * PAGE) / 1048576, track },
      socketPath: join(this.folder, `${id}.sock`),
      ...{ dirtyEpochs: this.#epochs, ...(regions ? { regions: twoRegions } : {}) },
    });
    const image = freshImage(imagePages);
    const vm = { id, mini, mode, image, launchParent: null, folder: null, ownerPaused: false };
    const added = { ...vm, guestPage: await guestPages(mini), log: this.log };
    this.vms.push(added);
    this.log(`${id}: fresh, mode ${mode}, tracking ${String(track)}`);
    // Where the memory of a VM is that has written nothing is told by this dialect only.
    if (this.dialect !== 'e2b') await writeFirstPage(added);
    await this.attach(added);
    return added;
  }

  async attach(vm: ModelVm): Promise<void> {
    await this.daemon.attach({
      socketPath: vm.mini.socketPath,
      vmId: vm.id,
      trackingMode: vm.mode,
      ...(vm.launchParent === null ? {} : { launchParent: vm.launchParent }),
    });
  }

  /** A VM that a fork made: running and attached. */
  async addChild(id: string, mini: MiniVm, from: ModelVm, at: Kept): Promise<void> {
    const guestPage = await guestPages(mini);
    const { log } = this;
    const child = { id, mini, mode: from.mode, image: [...at.expected.image], guestPage, log };
    this.vms.push({ ...child, launchParent: at.snapshot, folder: null, ownerPaused: false });
  }

  /** A VM restored from a snapshot into a new process, compared, then attached and running. */
  async addRestored(random: Random, kept: Kept): Promise<void> {
    const id = this.name();
    const mode = random.pick<TrackingMode>(['dirty', 'mincore', 'pagemap']);
    const track = mode === 'dirty' || random.chance(0.5);
    const options = { id, track, dirtyEpochs: this.#epochs };
    const mini = await restoreInto(this.daemon, kept.snapshot, this.dialect, options);
    const folder = dirname(mini.socketPath);
    const bytes = await mini.readBytes(0, imagePages * PAGE);
    this.requireSame(bytes, kept, 'restored');
    const image = pagesOf(bytes);
    const guestPage = await guestPages(mini);
    const vm = { id, mini, mode, image, guestPage, folder, launchParent: kept.snapshot };
    const added = { ...vm, log: this.log, ownerPaused: false };
    this.vms.push(added);
    this.counts.replaced += 1;
    this.log(`${id}: restored from ${kept.snapshot}, mode ${mode}, tracking ${String(track)}`);
    await mini.resume();
    await this.attach(added);
  }

  /** Detaches a VM and ends its process. */
  async dropVm(vm: ModelVm): Promise<void> {
    this.vms.splice(this.vms.indexOf(vm), 1);
    await this.daemon.detach(vm.id);
    await vm.mini[Symbol.asyncDispose]();
    if (vm.folder !== null) await rm(vm.folder, { recursive: true, force: true });
  }

  requireSame(bytes: Buffer, kept: Kept, what: string): void {
    this.counts.restores += 1;
    this.counts.pagesCompared += imagePages;
    const wrong = difference(bytes, kept.expected);
    if (wrong !== null) throw new Error(`snapshot ${kept.snapshot} ${what}: ${wrong}`);
  }

  /** Restores a snapshot into a fresh small VM and compares every page. */
  async restore(kept: Kept): Promise<void> {
    await using mini = await restoreInto(this.daemon, kept.snapshot, this.dialect);
    this.requireSame(await mini.readBytes(0, imagePages * PAGE), kept, 'in a fresh VM');
    await rm(dirname(mini.socketPath), { recursive: true, force: true });
  }

  /** Rebuilds a snapshot's memory file and compares every page. */
  async compare(kept: Kept): Promise<void> {
    const { memoryPath } = await rebuild(this.daemon, kept.snapshot);
    this.requireSame(await readFile(memoryPath), kept, 'rebuilt');
    await rm(dirname(memoryPath), { recursive: true, force: true });
  }

  /** Compares what was published since the last time. */
  async compareNew(): Promise<void> {
    for (const kept of this.kept.slice(this.#compared)) await this.compare(kept);
    this.#compared = this.kept.length;
  }

  #compared = 0;

  /** From now until `settle`, a published capture of this VM must read as `expected`. */
  expecting(vm: ModelVm, expected: Expected = { image: [...vm.image] }): void {
    if (this.#inFlight !== null) throw new Error('two captures at once');
    this.counts.captures += 1;
    this.#inFlight = { vm: vm.id, expected, sawCommitted: null };
  }

  /** Follows a capture that was started, for so many events or to its end; the daemon may die. */
  async follow(capture: string, eventsMax = Infinity): Promise<void> {
    let seen = 0;
    for await (const { event, data } of this.daemon.events(capture)) {
      const { status } = data as { status?: CaptureView['status'] };
      const committed = status === 'committed' || status === 'published';
      if (event === 'status' && committed && this.#inFlight !== null) {
        this.#inFlight.sawCommitted = capture;
      }
      seen += 1;
      if (seen >= eventsMax) return;
    }
  }

  /**
   * Waits for all captures to end and books them. What was committed must be published, once.
   * Returns those that ended since the last time.
   */
  async settle(): Promise<CaptureView[]> {
    const ended: CaptureView[] = [];
    for (const { captureId } of await this.daemon.captures()) {
      if (this.#resolved.has(captureId)) continue;
      const capture = await this.#final(captureId);
      this.#resolved.add(captureId);
      ended.push(capture);
      this.#book(capture);
    }
    this.#inFlight = null;
    return ended;
  }

  async #final(captureId: string): Promise<CaptureView> {
    for (;;) {
      const capture = await this.daemon.ended(captureId);
      if (capture.status === 'published' || capture.status === 'aborted') return capture;
    }
  }

  #book(capture: CaptureView): void {
    const flight = this.#inFlight;
    if (flight?.vm !== capture.vmId) {
      throw new Error(`capture ${capture.captureId} of ${capture.vmId} was not asked for`);
    }
    const { result } = capture;
    if (capture.status === 'aborted') {
      this.counts.aborted += 1;
      if (flight.sawCommitted === capture.captureId) throw new Error('a committed capture aborted');
      return;
    }
    if (result === null) throw new Error('a published capture has a result');
    this.counts.published += 1;
    if (result.selection === 'widened') this.counts.widened += 1;
    this.kept.push({ snapshot: result.snapshotId, expected: flight.expected });
    this.log(`  ${capture.vmId} epoch ${result.epoch} ${result.selection}: ${result.snapshotId}`);
  }

  /** Invariants that hold whenever no capture is asked for. */
  async check(): Promise<void> {
    const attached = await this.daemon.vms();
    const ids = attached.map((vm) => vm.vmId).sort();
    const wanted = this.vms.map((vm) => vm.id).sort();
    if (ids.join() !== wanted.join()) throw new Error(`attached: ${ids.join()}`);
    for (const { vmId, state, pausedByUs, captureId } of attached) {
      if (state === 'attached' && !pausedByUs && captureId === null) continue;
      throw new Error(`VM ${vmId}: ${state}, paused by us ${String(pausedByUs)}, ${captureId}`);
    }
    for (const vm of this.vms) {
      const { state } = await vm.mini.info();
      const should = vm.ownerPaused ? 'Paused' : 'Running';
      if (state !== should) throw new Error(`VM ${vm.id} is ${state}, should be ${should}`);
      if (!vm.ownerPaused) await ticks(vm.mini);
    }
    await this.#atRest();
    for (const layer of readNodeState(this.folder).layers) {
      if (layer.generation > 0) this.#compacted.add(layer.uuid);
    }
    this.counts.compactions = this.counts.compactions + this.#compacted.size - this.#seen;
    this.#seen = this.#compacted.size;
  }

  #seen = 0;

  /** Waits while compactions work, by asking the daemon; then nothing may be left over. */
  async #atRest(): Promise<void> {
    let found: string[] = [];
    for (let asked = 0; asked < 400; asked += 1) {
      found = leftovers(this.folder);
      if (found.length === 0) return;
      await this.daemon.vms();
    }
    throw new Error(`left over: ${found.join('; ')}`);
  }

  /** Exactly the snapshots that the model knows are in the catalog. */
  async checkCatalog(): Promise<void> {
    const listed: string[] = [];
    for (let cursor = ''; ;) {
      const path = `/v1/snapshots?limit=100${cursor === '' ? '' : `&cursor=${cursor}`}`;
      const { body } = await this.daemon.send('GET', path);
      const page = body as { snapshots: readonly { id: string }[]; nextCursor?: string | null };
      listed.push(...page.snapshots.map((each) => each.id));
      if (page.nextCursor === null || page.nextCursor === undefined) break;
      cursor = page.nextCursor;
    }
    const known = this.kept.map((each) => each.snapshot).sort();
    if (listed.sort().join() !== known.join()) {
      throw new Error(`catalog: ${listed.length} snapshots, model: ${known.length}`);
    }
    await holdsSettled(this.daemon);
  }

  /** Fills the layers' disk to the last byte; disposal makes room again. */
  fillDisk(): Disposable {
    const path = join(this.folder, 'state/layers', 'ballast');
    try {
      for (let size = 1 << 20; ; size = Math.max(size / 2, 4096)) {
        try {
          for (;;) writeFileSync(path, Buffer.alloc(size), { flag: 'a' });
        } catch (error) {
          if (size === 4096) throw error;
        }
      }
    } catch (error) {
      if ((error as NodeJS.ErrnoException).code !== 'ENOSPC') throw error;
    }
    return { [Symbol.dispose]: () => rmSync(path, { force: true }) };
  }
}

/** The guest writes pages, and the model with it. */
export async function writePages(vm: ModelVm, pages: readonly number[], how: Fill): Promise<void> {
  await vm.mini.run({ pages: { pages: [...pages] }, ...how });
  for (const page of pages) vm.image[page] = written(vm, page, how);
}

/** What a page of the VM will be once the guest has written it so. */
export const written = (vm: ModelVm, page: number, how: Fill): Buffer =>
  afterProgram(vm.image[page] ?? zeroPage, vm.guestPage(page), how);

async function writeFirstPage({ mini, image }: ModelVm): Promise<void> {
  await mini.deviceWrites({ pages: { pages: [0] }, value: 1 });
  image[0] = afterDevice(0, 1);
}

function mountSmallDisk(folder: string): boolean {
  const options = ['-t', 'tmpfs', '-o', 'size=64m', 'tmpfs', folder];
  return spawnSync('mount', options).status === 0;
}

async function guestPages(mini: MiniVm): Promise<(page: number) => number> {
  const { regions } = await mini.info();
  return (page) => {
    const region = regions.find((each) => page * PAGE < each.imageOffset + each.bytes);
    if (region === undefined) throw new Error(`page ${page} is outside the image`);
    return Number(BigInt(region.guestAddress) / BigInt(PAGE)) + page - region.imageOffset / PAGE;
  };
}

function pagesOf(bytes: Buffer): Image {
  const pages: Image = [];
  for (let at = 0; at < bytes.length; at += PAGE) pages.push(bytes.subarray(at, at + PAGE));
  return pages;
}

/** The guest's own counter moves. */
async function ticks(mini: MiniVm): Promise<void> {
  const { counter } = await mini.counters();
  while ((await mini.counters()).counter === counter);
}
