import { statSync } from 'node:fs';
import { MIB } from '../units.ts';
import { notAfterStart, notBeforeStart, VmmFault } from './answer.ts';
import { checkRegions, regionsOfSize, toRows, type RegionSpec } from './layout.ts';
import { loadNative, type NativeVm } from './native.ts';
import { readState, writeState, type MachineConfig, type VmStateFile } from './state-file.ts';

export const dialects = ['firecracker', 'aenv', 'e2b', 'all'] as const;
export type Dialect = (typeof dialects)[number];

export const backends = ['auto', 'kvm', 'thread'] as const;

export interface GuestOptions {
  readonly id: string;
  readonly dialect: Dialect;
  readonly backend: (typeof backends)[number];
  readonly dirtyEpochs: boolean;
  /** As upstream saves a VM: the state first, with a CRC-64 at its end, and then the memory. */
  readonly upstreamState: boolean;
  readonly hugePages: boolean;
}

export interface LoadRequest {
  readonly snapshotPath: string;
  readonly backing: 'File' | 'Uffd';
  readonly memoryPath: string;
  readonly track: boolean;
  readonly resume: boolean;
}

const vmmVersions: Record<Dialect, string> = {
  firecracker: '1.13.1',
  aenv: '1.15.1-patch-v1',
  e2b: '1.12.1_a41d3fb',
  all: '1.13.1',
};

/**
 * One VM from configuration to exit.
 *
 * | state       | start / load | pause  | resume  | configure |
 * |-------------|--------------|--------|---------|-----------|
 * | Not started | Running or Paused | refused | refused | allowed |
 * | Running     | refused      | Paused | Running | refused   |
 * | Paused      | refused      | Paused | Running | refused   |
 */
export class Guest {
  readonly options: GuestOptions;
  /** Settled by the start, or by the snapshot that is loaded. */
  backend: 'kvm' | 'thread';
  /** Why the guest is a thread where nobody asked for one; empty where it could be a KVM guest. */
  readonly backendReason: string;
  config: MachineConfig = {
    vcpu_count: 1,
    mem_size_mib: 128,
    smt: false,
    track_dirty_pages: false,
    huge_pages: 'None',
  };
  /** What pre-boot requests stored, by path: shown in `GET /vm/config`, without effect. */
  readonly stored = new Map<string, unknown>();
  /** Boot-specific resources were configured: a snapshot can no longer be loaded. */
  configured = false;
  /** Set by a load that failed: Firecracker exits then, and so does this process. */
  broken = false;
  #regions: RegionSpec[] | null = null;
  #vm: NativeVm | null = null;
  #paused = true;
  #memoryPath: string | null = null;
  readonly #native = loadNative();

  constructor(options: GuestOptions) {
    this.options = options;
    if (options.backend === 'thread') {
      this.backend = 'thread';
      this.backendReason = 'asked for';
      return;
    }
    this.backendReason = this.#native.probeKvm();
    this.backend = this.backendReason === '' ? 'kvm' : 'thread';
    if (options.backend === 'kvm' && this.backend !== 'kvm') {
      throw new Error(`KVM is not usable: ${this.backendReason}`);
    }
  }

  get vmmVersion(): string {
    return vmmVersions[this.options.dialect];
  }

  get state(): 'Not started' | 'Running' | 'Paused' {
    if (this.#vm === null) return 'Not started';
    return this.#paused ? 'Paused' : 'Running';
  }

  /** The running or paused VM. */
  get vm(): NativeVm {
    if (this.#vm === null) throw new VmmFault(notBeforeStart);
    return this.#vm;
  }

  /** As `vm`, and refuses while it runs. */
  get pausedVm(): NativeVm {
    const vm = this.vm;
    if (!this.#paused) {
      throw new VmmFault(
        'The requested operation is not supported while the microVM is running: pause it first.',
      );
    }
    return vm;
  }

  /** As `pausedVm`; an open epoch's set may be read while the VM runs too: it does not change. */
  get vmForDirtySet(): NativeVm {
    return this.vm.epoch('status').open ? this.vm : this.pausedVm;
  }

  requireNotStarted(): void {
    if (this.#vm !== null) throw new VmmFault(notAfterStart);
  }

  setRegions(regions: RegionSpec[]): void {
    this.requireNotStarted();
    checkRegions(regions);
    this.#regions = regions;
    const bytes = regions.reduce((sum, region) => sum + region.bytes, 0);
    this.config = { ...this.config, mem_size_mib: Math.ceil(bytes / MIB) };
  }

  start(): void {
    this.requireNotStarted();
    this.#vm = this.#create({
      regions: this.#regions ?? regionsOfSize(this.config.mem_size_mib),
      backing: 'Anonymous',
      memoryPath: '',
    });
    this.resume();
  }

  pause(): void {
    this.vm.pause();
    this.#paused = true;
  }

  resume(): void {
    this.vm.resume();
    this.#paused = false;
  }

  /** Writes the state file; with `memFilePath` also the memory file, which resets the dirty set. */
  snapshot(type: 'Full' | 'Diff', statePath: string, memFilePath: string | undefined): void {
    const vm = this.pausedVm;
    const rows = vm.regions();
    const regions: { guest_address: string; bytes: number }[] = [];
    for (let i = 0; i < rows.length; i += 4) {
      regions.push({ guest_address: String(rows[i]), bytes: Number(rows[i + 3]) });
    }
    const vcpu = vm.saveVcpu();
    const window = vm.saveWindow();
    const writeMemory = (): void => {
      if (memFilePath === undefined) return;
      this.#refuseOwnFile(memFilePath);
      vm.writeMemory(memFilePath, type === 'Diff' ? 'dirty' : null);
    };
    const { upstreamState } = this.options;
    if (!upstreamState) writeMemory();
    const state: VmStateFile = {
      header: {
        vmm_version: this.vmmVersion,
        backend: this.backend,
        page_size: 4096,
        machine_config: this.config,
        regions,
        vcpu_bytes: vcpu.length,
        window_bytes: window.length,
      },
      vcpu,
      window,
    };
    writeState(statePath, state, { summed: upstreamState });
    if (upstreamState) writeMemory();
    if (memFilePath !== undefined && !vm.epoch('status').open) vm.resetDirty();
  }

  load(request: LoadRequest): void {
    this.requireNotStarted();
    if (this.configured) {
      throw new VmmFault(
        'Load snapshot error: Loading a microVM snapshot not allowed after configuring ' +
          'boot-specific resources.',
      );
    }
    this.broken = true;
    const { header, vcpu, window } = readState(request.snapshotPath);
    if (header.backend !== this.backend && !this.#canTurnInto(header.backend)) {
      throw new VmmFault(
        `Load snapshot error: the snapshot is of a ${header.backend} guest, ` +
          `this VMM runs a ${this.backend} guest`,
      );
    }
    const regions = header.regions.map((region) => ({
      guestAddress: BigInt(region.guest_address),
      bytes: region.bytes,
    }));
    checkRegions(regions);
    // Tracking is not saved in a snapshot: it is what the load asks for.
    this.backend = header.backend;
    this.config = { ...header.machine_config, track_dirty_pages: request.track };
    const { backing, memoryPath } = request;
    this.#vm = this.#create({ regions, backing, memoryPath, vcpu, window });
    this.#memoryPath = backing === 'File' ? memoryPath : null;
    this.broken = false;
    if (request.resume) this.resume();
  }

  /** Where nobody asked for a backend, a restored guest is of its snapshot's. */
  #canTurnInto(backend: 'kvm' | 'thread'): boolean {
    if (this.options.backend !== 'auto') return false;
    return backend === 'thread' || this.#native.probeKvm() === '';
  }

  #create(from: {
    readonly regions: readonly RegionSpec[];
    readonly backing: 'Anonymous' | 'File' | 'Uffd';
    readonly memoryPath: string;
    readonly vcpu?: Buffer;
    readonly window?: Buffer;
  }): NativeVm {
    return new this.#native.Vm({
      regions: toRows(from.regions),
      backend: this.backend,
      track: this.config.track_dirty_pages,
      huge: this.options.hugePages,
      backing: from.backing,
      memoryPath: from.memoryPath,
      savedVcpu: from.vcpu,
      savedWindow: from.window,
    });
  }

  /** Emptying the file that guest memory is mapped from would take the guest's pages away. */
  #refuseOwnFile(memFilePath: string): void {
    if (this.#memoryPath === null) return;
    const own = statSync(this.#memoryPath, { throwIfNoEntry: false });
    const target = statSync(memFilePath, { throwIfNoEntry: false });
    if (own !== undefined && own.ino === target?.ino && own.dev === target.dev) {
      throw new VmmFault(`Create snapshot error: ${memFilePath} backs this VM's memory`);
    }
  }
}
