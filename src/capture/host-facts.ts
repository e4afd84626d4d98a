import { existsSync } from 'node:fs';
import { arch, cpus, release } from 'node:os';
import { join } from 'node:path';

/**
 * How guests run on this host: `pvm` is KVM without hardware support (module `kvm_pvm`), whose VM
 * states do not fit `kvm`; `none` where there is no KVM at all, as for the small VM's thread guest.
 */
export type Virtualization = 'kvm' | 'pvm' | 'none';

/** What a restore may want to compare its host with. */
export interface HostFacts {
  readonly architecture: string;
  readonly cpuModel: string;
  readonly kernel: string;
}

export function hostFacts(): HostFacts {
  const cpuModel = cpus()[0]?.model.trim() ?? 'unknown';
  return { architecture: arch(), cpuModel, kernel: release() };
}

/**
 * A vendor module of KVM excludes the others while it is loaded, so `kvm_pvm` decides.
 * @param root of `/sys` and `/dev`
 */
export function hostVirtualization(root = '/'): Virtualization {
  const there = (path: string): boolean => existsSync(join(root, path));
  if (there('sys/module/kvm_pvm')) return 'pvm';
  return there('dev/kvm') || there('sys/module/kvm') ? 'kvm' : 'none';
}
