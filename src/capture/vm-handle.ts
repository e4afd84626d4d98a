/** One attached VM in this process: who it is, how to talk to it, where its dirty set comes from. */
import type { VmId } from '../units.ts';
import type { VmmClient } from '../vmm/client.ts';
import type { ProcessIdentity } from '../vmm/identity.ts';
import type { VmmFacts } from '../vmm/probe.ts';
import type { DirtySource } from '../vmm/source.ts';

export class VmHandle implements Disposable {
  readonly vmId: VmId;
  readonly client: VmmClient;
  readonly identity: ProcessIdentity;
  readonly facts: VmmFacts;
  readonly source: DirtySource;

  constructor(parts: {
    readonly vmId: VmId;
    readonly client: VmmClient;
    readonly identity: ProcessIdentity;
    readonly facts: VmmFacts;
    readonly source: DirtySource;
  }) {
    this.vmId = parts.vmId;
    this.client = parts.client;
    this.identity = parts.identity;
    this.facts = parts.facts;
    this.source = parts.source;
  }

  get gone(): boolean {
    return this.identity.hasExited();
  }

  [Symbol.dispose](): void {
    this.identity[Symbol.dispose]();
  }
}
