import { existsSync } from 'node:fs';
import { createRequire } from 'node:module';
import path from 'node:path';
import { fileURLToPath } from 'node:url';

/** Face of the `minivm` addon. Every method throws an `Error` whose message is the VMM's reason. */
export interface NativeVm {
  /** Returns when the vCPU no longer executes: no write happens after it. */
  pause(): void;
  resume(): void;
  program(program: NativeProgram): { readonly guestPages: number; readonly devicePages: number };
  counters(): GuestCounters;
  resetGap(): void;
  /** A device's write: marks the VMM's bitmap, not the guest's log. May cross regions. */
  deviceWrite(imageOffset: number, data: Uint8Array): void;
  readBytes(imageOffset: number, length: number): Buffer;
  hashPages(firstPage: number, pageCount: number): BigUint64Array;
  remove(firstPage: number, pageCount: number, markDirty: boolean): void;
  setReadable(page: number, readable: boolean): void;
  addRegion(guestAddress: bigint, bytes: number): void;
  dropRegion(): void;
  /** Rows of 4: guest address, host address, image offset, bytes. */
  regions(): BigUint64Array;
  /** Words of all regions one after the other, each region padded to a whole word. */
  bits(set: PageSet): BigUint64Array;
  /** JSON text: `[{"base_host_virt_addr":…,"image_offset":…,"length":…},…]`, exact digits. */
  rangesJson(set: PageSet): string;
  /** JSON text: the words of `bits`, exact digits. */
  bitsJson(set: PageSet): string;
  resetDirty(): void;
  epoch(action: 'begin' | 'commit' | 'abort' | 'status'): EpochStatus;
  /** Writes the memory file: the pages of `set`, or everything. Synced when it returns. */
  writeMemory(path: string, set: PageSet | null): void;
  saveVcpu(): Buffer;
  saveWindow(): Buffer;
}

export const pageSets = ['dirty', 'removed', 'resident', 'empty', 'guest-log', 'vmm-log'] as const;
export type PageSet = (typeof pageSets)[number];

export interface NativeProgram {
  readonly command: 'random' | 'fill' | 'read' | 'idle';
  /** Image pages; without it, `first` and `count` say which. */
  readonly list: Float64Array | undefined;
  readonly first: number;
  readonly count: number;
  readonly words: number;
  readonly value: number;
  readonly loop: boolean;
  readonly pagesPerSecond: number;
}

export interface GuestCounters {
  /** Turns of the guest's main loop; never goes back, and lives on in a restored VM. */
  readonly counter: number;
  /** Largest time between two turns since the last reset, by the guest's own clock. */
  readonly maxGapNs: number;
  readonly pagesTotal: number;
  readonly passes: number;
  readonly readSum: number;
  readonly idle: boolean;
  /** Why the vCPU stopped for good; empty while it has not. */
  readonly crash: string;
}

export interface EpochStatus {
  readonly epoch: number;
  readonly open: boolean;
}

export interface NativeVmOptions {
  /** Rows of 2: guest address, bytes. */
  readonly regions: BigUint64Array;
  readonly backend: 'kvm' | 'thread';
  readonly track: boolean;
  readonly huge: boolean;
  readonly backing: 'Anonymous' | 'File' | 'Uffd';
  readonly memoryPath: string;
  readonly savedVcpu: Uint8Array | undefined;
  readonly savedWindow: Uint8Array | undefined;
}

interface NativeModule {
  readonly abiVersion: number;
  readonly Vm: new (options: NativeVmOptions) => NativeVm;
  /** Empty if KVM can run an instruction here; otherwise why not. */
  probeKvm(): string;
}

const ABI_VERSION = 1;

/** The nearest folder above this file that holds `package.json`. */
export function packageRoot(): string {
  let folder = path.dirname(fileURLToPath(import.meta.url));
  while (!existsSync(path.join(folder, 'package.json'))) {
    const parent = path.dirname(folder);
    if (parent === folder) throw new Error('package.json not found above the small VM');
    folder = parent;
  }
  return folder;
}

export function loadNative(): NativeModule {
  const file = path.join(packageRoot(), 'build', 'Release', 'minivm.node');
  const loaded = createRequire(import.meta.url)(file) as NativeModule;
  if (loaded.abiVersion !== ABI_VERSION) {
    throw new Error(`${file} has ABI version ${loaded.abiVersion}, expected ${ABI_VERSION}`);
  }
  return loaded;
}
