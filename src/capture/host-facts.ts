import { arch, cpus, release } from 'node:os';

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
