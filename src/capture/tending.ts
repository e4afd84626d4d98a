/**
 * VMs that need another try: their VMM did not answer when the daemon started, or would not resume
 * after a capture. Each is tried again in the background, with growing waits, until it runs and is
 * attached, or its process is gone.
 */
import type { Clock } from '../clock.ts';
import type { NodeDb } from '../lineage/node-db.ts';
import type { VmRecord } from '../lineage/vms.queries.ts';
import type { FailureDetail, Result } from '../result.ts';
import type { CaptureId, VmId } from '../units.ts';
import { letRun } from '../vmm/let-run.ts';
import { isAlive } from '../vmm/process-life.ts';
import type { RunDeps } from './run.ts';
import type { CaptureObserver } from './observer.ts';
import type { VmTable } from './vm-table.ts';

export interface TendingDeps {
  readonly nodeDb: NodeDb;
  readonly clock: Clock;
  readonly observer: CaptureObserver;
  readonly supervisor: RunDeps['supervisor'];
  readonly vms: VmTable;
  /** Takes the VM up again where its VMM answers. */
  readonly rebind: (record: VmRecord) => Promise<void>;
  /** The daemon stops. */
  readonly signal: AbortSignal;
}

const waitMsMin = 200;
const waitMsMax = 10_000;

/** Whether the process that was attached still lives, whoever listens on its socket. */
export function processLives(record: Pick<VmRecord, 'pid' | 'startTimeTicks'>): boolean {
  return isAlive(record);
}

export class Tending {
  readonly #deps: TendingDeps;
  readonly #tended = new Set<VmId>();
  /** VMs that run again, of which node.db still says that we have paused them. */
  readonly #runs = new Set<VmId>();

  constructor(deps: TendingDeps) {
    this.#deps = deps;
  }

  /** VMs that we have paused and that stand still, for all that is known: no resume has worked yet. */
  get stuckPaused(): number {
    const stuck = [...this.#tended].filter((vmId) => {
      const record = this.#deps.nodeDb.getVm(vmId);
      return record !== undefined && record.pausedBy !== null && !this.#runs.has(vmId);
    });
    return stuck.length;
  }

  /**
   * Resolves when there is nothing left to do for the VM, or the daemon stops. Never rejects.
   * @param known `runs`: it was resumed, and only the record of that is missing
   */
  async tend(vmId: VmId, known: { readonly runs: boolean }): Promise<void> {
    if (this.#tended.has(vmId)) return;
    this.#tended.add(vmId);
    if (known.runs) this.#runs.add(vmId);
    const { clock, signal, observer } = this.#deps;
    try {
      for (let waitMs = waitMsMin; !signal.aborted; waitMs = Math.min(waitMs * 2, waitMsMax)) {
        await clock.sleep(waitMs, signal);
        if (await this.#try(vmId)) return;
      }
    } catch (error) {
      if (!signal.aborted) observer.warn('a VM could not be tended', { vm: vmId, error });
    } finally {
      this.#tended.delete(vmId);
      this.#runs.delete(vmId);
    }
  }

  /** True: done with it. */
  async #try(vmId: VmId): Promise<boolean> {
    const { nodeDb, vms, signal } = this.#deps;
    const record = nodeDb.getVm(vmId);
    if (record === undefined) return true;
    if (!processLives(record)) return this.#ended(record);
    if (vms.handle(vmId) === undefined) await this.#deps.rebind(record);
    const handle = vms.handle(vmId);
    if (handle === undefined) return false;
    if (record.pausedBy === null) return true;
    if (!this.#runs.has(vmId)) {
      const resumed = await letRun(handle.client, signal);
      if (!resumed.ok && resumed.error.kind !== 'vm-exited') return false;
      // Should recording it fail: by the next try its owner may have paused it.
      this.#runs.add(vmId);
      this.#deps.supervisor.resumed(handle);
    }
    return this.#cleared(nodeDb.clearPaused(vmId, record.pausedBy), vmId, record.pausedBy);
  }

  #ended({ vmId, pausedBy }: VmRecord): boolean {
    if (pausedBy === null) return true;
    const handle = this.#deps.vms.handle(vmId);
    if (handle !== undefined) this.#deps.supervisor.resumed(handle);
    return this.#cleared(this.#deps.nodeDb.clearPaused(vmId, pausedBy), vmId, pausedBy);
  }

  #cleared(outcome: Result<void, FailureDetail>, vm: VmId, capture: CaptureId): boolean {
    if (!outcome.ok) {
      const facts = { vm, capture, error: outcome.error };
      this.#deps.observer.warn('a resume could not be recorded', facts);
    }
    return outcome.ok;
  }
}
