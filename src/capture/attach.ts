/**
 * Binds a VM's API socket to a process that is who it says, and finds out what can be captured of
 * it how.
 */
import { confinePath } from '../config/roots.ts';
import type { Config } from '../config/schema.ts';
import type { MemoryLayout } from '../memory.ts';
import { err, ok, type FailureDetail, type Result } from '../result.ts';
import { vmId, type VmId } from '../units.ts';
import { defaultTimeouts, VmmClient, type VmmTimeouts } from '../vmm/client.ts';
import { identify } from '../vmm/identity.ts';
import { openDirtySource } from '../vmm/open-source.ts';
import { enableTracking, probeVmm, type VmmFacts } from '../vmm/probe.ts';
import { ShadowedSource } from '../vmm/shadow.ts';
import type { DirtySource, TrackingMode } from '../vmm/source.ts';
import { readSwapAreas } from '../vmm/swap.ts';
import { VmHandle } from './vm-handle.ts';

export interface BindRequest {
  readonly socketPath: string;
  /** Default: the VMM's own instance id. */
  readonly vmId?: string | undefined;
  readonly trackingMode: TrackingMode;
  /** A process that was attached before, and where its memory was found to be. */
  readonly recalled?:
    | { readonly pid: number; readonly startTimeTicks: bigint; readonly layout: MemoryLayout }
    | undefined;
}

/** Ids are names, never paths. Source: DESIGN §9, the alias rule. */
const vmIdPattern = /^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$/;

export async function bindVm(
  config: Config,
  request: BindRequest,
  signal: AbortSignal,
): Promise<Result<VmHandle, FailureDetail>> {
  const socket = confinePath(request.socketPath, config.paths.socketRoots);
  if (!socket.ok) return socket;
  const identity = identify(socket.value);
  if (!identity.ok) return identity;
  const client = new VmmClient({ socketPath: socket.value, timeoutsMs: vmmTimeouts(config) });
  client.bind(identity.value);
  const handle = await bindIdentified(config, request, client, identity.value, signal);
  if (!handle.ok) identity.value[Symbol.dispose]();
  return handle;
}

type Identity = Extract<ReturnType<typeof identify>, { ok: true }>['value'];

async function bindIdentified(
  config: Config,
  request: BindRequest,
  client: VmmClient,
  identity: Identity,
  signal: AbortSignal,
): Promise<Result<VmHandle, FailureDetail>> {
  const mode = request.trackingMode;
  let probed = await probeVmm(client, signal);
  if (!probed.ok) return probed;
  if (mode === 'dirty' && probed.value.state === 'Not started') {
    const enabled = await enableTracking(client, signal);
    if (!enabled.ok) return enabled;
    probed = await probeVmm(client, signal);
    if (!probed.ok) return probed;
  }
  const facts = probed.value;
  const id = idOf(request, facts);
  if (!id.ok) return id;
  const readSwaps = (): ReturnType<typeof readSwapAreas> => readSwapAreas();
  const recalled = recalledBy(request, identity);
  const source = await openDirtySource({ client, facts, identity, mode, readSwaps, recalled });
  if (!source.ok) return source;
  const trackedSinceLaunch = await toldSinceLaunch(facts, source.value, signal);
  const shadowed = config.memorySnapshot.trackingShadow === 'pagemap';
  const chosen = shadowed ? new ShadowedSource(source.value, identity) : source.value;
  return ok(
    new VmHandle({ vmId: id.value, client, identity, facts, source: chosen, trackedSinceLaunch }),
  );
}

/**
 * Whether every write since launch is still in the VMM's tracking, as far as the VMM says: it has
 * not run yet, or nobody has committed an epoch of it.
 */
async function toldSinceLaunch(
  facts: VmmFacts,
  { epochs }: DirtySource,
  signal: AbortSignal,
): Promise<boolean> {
  if (facts.state === 'Not started') return true;
  if (epochs === null) return false;
  const status = await epochs.status(signal);
  return status.ok && status.value.epoch === 0;
}

/** Addresses mean something within one process only. */
function recalledBy({ recalled }: BindRequest, identity: Identity): MemoryLayout | undefined {
  if (recalled?.pid !== identity.pid) return undefined;
  return recalled.startTimeTicks === identity.startTimeTicks ? recalled.layout : undefined;
}

function idOf(request: BindRequest, facts: VmmFacts): Result<VmId, FailureDetail> {
  const id = request.vmId ?? facts.id;
  if (vmIdPattern.test(id)) return ok(vmId(id));
  const shown = JSON.stringify(id.slice(0, 140));
  return err({ kind: 'vm-id-invalid', message: `${shown} can't name a VM: ${vmIdPattern.source}` });
}

/** What `[vmm]` says, for every client of a VMM. */
export function vmmTimeouts(config: Pick<Config, 'vmm'>): VmmTimeouts {
  const { requestTimeout, snapshotTimeout } = config.vmm;
  return {
    queryMs: requestTimeout,
    changeMs: requestTimeout,
    bulkMs: Math.max(requestTimeout, defaultTimeouts.bulkMs),
    snapshotMs: snapshotTimeout,
  };
}
