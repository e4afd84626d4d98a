import type { VmRecord } from '../lineage/vms.queries.ts';

/** What the record of a VM keeps for this room. */
export interface VmRecordFacts {
  /** Catalog hold on its launch parent. */
  readonly hold: string | null;
  /** Folder of the memory file that a fork started it from. */
  readonly prepared: string | null;
}

export function factsOf(vm: VmRecord): VmRecordFacts {
  const facts = JSON.parse(vm.factsJson) as Partial<VmRecordFacts>;
  return { hold: facts.hold ?? null, prepared: facts.prepared ?? null };
}
