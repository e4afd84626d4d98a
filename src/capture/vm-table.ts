/** The VMs of this daemon: what node.db knows, joined with the processes that are really there. */
import type { NodeDb } from '../lineage/node-db.ts';
import type { VmRecord } from '../lineage/vms.queries.ts';
import type { CaptureId, VmId } from '../units.ts';
import type { Dialect, VmView } from './types.ts';
import { processLives } from './tending.ts';
import { factsOf } from './vm-facts.ts';
import type { VmHandle } from './vm-handle.ts';

export class VmTable {
  readonly #nodeDb: NodeDb;
  readonly #handles = new Map<VmId, VmHandle>();

  constructor(nodeDb: NodeDb) {
    this.#nodeDb = nodeDb;
  }

  handle(id: VmId): VmHandle | undefined {
    return this.#handles.get(id);
  }

  put(handle: VmHandle): void {
    this.#handles.get(handle.vmId)?.[Symbol.dispose]();
    this.#handles.set(handle.vmId, handle);
  }

  drop(id: VmId): void {
    this.#handles.get(id)?.[Symbol.dispose]();
    this.#handles.delete(id);
  }

  closeAll(): void {
    for (const id of [...this.#handles.keys()]) this.drop(id);
  }

  view(id: VmId, running: CaptureId | null): VmView | undefined {
    const record = this.#nodeDb.getVm(id);
    return record === undefined ? undefined : this.#viewOf(record, running);
  }

  list(runningOf: (id: VmId) => CaptureId | null): VmView[] {
    return this.#nodeDb.listVms().map((record) => this.#viewOf(record, runningOf(record.vmId)));
  }

  #viewOf(record: VmRecord, running: CaptureId | null): VmView {
    const handle = this.#handles.get(record.vmId);
    return {
      vmId: record.vmId,
      socketPath: record.socketPath,
      pid: record.pid,
      dialect: record.dialect as Dialect,
      vmmVersion: factsOf(record).version,
      trackingMode: record.trackingMode as VmView['trackingMode'],
      epoch: record.epoch,
      memoryParent: record.memoryHead,
      launchParent: record.launchHead,
      chainDepth: this.#nodeDb.memoryChain(record.vmId)?.depth ?? 0,
      imageBytes: record.imageBytes,
      pausedByUs: record.pausedBy !== null,
      captureId: running,
      state: stateOf(record, handle),
    };
  }
}

function stateOf(record: VmRecord, handle: VmHandle | undefined): VmView['state'] {
  if (handle !== undefined) return handle.gone ? 'gone' : 'attached';
  return processLives(record) ? 'unreachable' : 'gone';
}
