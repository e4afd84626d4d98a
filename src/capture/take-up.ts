/** Puts a VM on record, with what it was launched from. */
import type { LayerRef } from '../lineage/layers.queries.ts';
import type { NodeDb } from '../lineage/node-db.ts';
import { ok } from '../result.ts';
import type { CaptureId, HoldId, SnapshotId, VmId } from '../units.ts';
import { withLocalChain, type ChainDeps } from './launch-chain.ts';
import { refused, vmUnknown } from './refusals.ts';
import type { Outcome, VmView } from './types.ts';
import { bootId } from '../vmm/process-life.ts';
import type { VmHandle } from './vm-handle.ts';
import type { VmTable } from './vm-table.ts';

export interface TakeUpDeps {
  readonly nodeDb: NodeDb;
  readonly vms: VmTable;
  /** The capture that runs on the VM now, with the handle it began with. */
  readonly runningOn: (vm: VmId) => CaptureId | null;
}

export interface LaunchedFrom {
  /** Bottom to top; empty for a fresh VM. */
  readonly layers: readonly LayerRef[];
  /** Owned by the VM while it is attached; null where it was launched from nothing. */
  readonly hold: HoldId | null;
  readonly preparedId: string | null;
  /** We loaded it: everything it has written since is in its tracking. */
  readonly byUs: boolean;
}

/** A program that is refused may go on with the VM as it is attached. */
const ownerFacts = (error: { readonly kind: string; readonly vmId?: VmId }) =>
  error.kind === 'vm-attached' && error.vmId !== undefined ? { vmId: error.vmId } : undefined;

/** The handle is the table's from now on, or closed. Attaching the same process again is fine. */
export function takeUp(
  deps: TakeUpDeps,
  handle: VmHandle,
  launched: LaunchedFrom,
): Outcome<VmView> {
  const { nodeDb, vms } = deps;
  let kept = false;
  try {
    const attached = nodeDb.attachVm({
      vmId: handle.vmId,
      socketPath: handle.client.socketPath,
      pid: handle.identity.pid,
      startTimeTicks: handle.identity.startTimeTicks,
      bootId: bootId(),
      dialect: handle.facts.dialect,
      trackingMode: handle.source.kind,
      imageBytes: null,
      launchParent: launched.layers,
      launchFilesOurs: true,
      trackedSinceLaunch: launched.byUs || handle.trackedSinceLaunch,
      hold: launched.hold,
      preparedId: launched.preparedId,
      factsJson: JSON.stringify({
        version: handle.facts.version,
        capabilities: handle.facts.capabilities,
      }),
    });
    if (!attached.ok) return refused(attached.error, ownerFacts(attached.error));
    kept = true;
    // A capture that runs goes on with the handle it has.
    const running = deps.runningOn(handle.vmId);
    if (running === null) vms.put(handle);
    else handle[Symbol.dispose]();
    const view = vms.view(handle.vmId, running);
    return view === undefined ? refused(vmUnknown(handle.vmId)) : ok(view);
  } finally {
    if (!kept) handle[Symbol.dispose]();
  }
}

/** For one launched from a snapshot: asks the catalog, and the store for layers that are missing. */
export async function takeUpFrom(
  deps: TakeUpDeps & ChainDeps,
  snapshot: SnapshotId,
  handle: VmHandle,
  launched: Pick<LaunchedFrom, 'byUs' | 'preparedId'>,
  signal: AbortSignal,
): Promise<Outcome<VmView>> {
  const taken = { up: false };
  try {
    return await withLocalChain(
      deps,
      snapshot,
      ({ layers, hold }) => {
        taken.up = true;
        return takeUp(deps, handle, { ...launched, layers, hold });
      },
      signal,
    );
  } finally {
    if (!taken.up) handle[Symbol.dispose]();
  }
}
