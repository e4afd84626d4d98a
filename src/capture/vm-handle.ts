/**
 * One attached VM in this process: who it is, how to talk to it, where its dirty set comes from.
 */
import { Failure } from '../result.ts';
import type { VmId } from '../units.ts';
import type { VmmClient } from '../vmm/client.ts';
import type { ProcessIdentity } from '../vmm/identity.ts';
import type { VmmFacts } from '../vmm/probe.ts';
import type { DirtySource } from '../vmm/source.ts';
import { orThrow } from './failure.ts';

export class VmHandle implements Disposable {
  readonly vmId: VmId;
  readonly client: VmmClient;
  readonly identity: ProcessIdentity;
  readonly facts: VmmFacts;
  readonly source: DirtySource;
  /** At attach: the VMM's tracking still had every write since launch, for all that it says. */
  readonly trackedSinceLaunch: boolean;
  /**
   * The end of the VMM's own epoch, commit or abort, while it is on its way: the next capture waits
   * for it, or it would end the next one's.
   */
  settling: Promise<void> = Promise.resolve();

  constructor(parts: {
    readonly vmId: VmId;
    readonly client: VmmClient;
    readonly identity: ProcessIdentity;
    readonly facts: VmmFacts;
    readonly source: DirtySource;
    readonly trackedSinceLaunch: boolean;
  }) {
    this.vmId = parts.vmId;
    this.client = parts.client;
    this.identity = parts.identity;
    this.facts = parts.facts;
    this.source = parts.source;
    this.trackedSinceLaunch = parts.trackedSinceLaunch;
  }

  get gone(): boolean {
    return this.identity.hasExited();
  }

  /** Throws `Failure`, also where the VM was never started. */
  async isPaused(signal: AbortSignal): Promise<boolean> {
    const state = orThrow(await this.client.state(signal));
    if (state === 'Not started') {
      const message = `VM ${this.vmId} has not been started`;
      throw new Failure({ kind: 'vm-not-started', message });
    }
    return state === 'Paused';
  }

  /**
   * Tells a VMM with epochs of its own what became of the set it handed out last. Never rejects.
   */
  settleEpoch(outcome: 'commit' | 'abort', failed: (error: unknown) => void): void {
    const { epochs } = this.source;
    if (epochs === null) return;
    // Not the capture's signal: this is said on every outcome.
    const patient = new AbortController().signal;
    this.settling = epochs[outcome](patient).then(
      (settled) => (settled.ok ? undefined : failed(settled.error)),
      failed,
    );
  }

  [Symbol.dispose](): void {
    this.identity[Symbol.dispose]();
  }
}
