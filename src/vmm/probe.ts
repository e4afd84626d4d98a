/**
 * What a VMM is and can do, found out by asking. Firecracker has no list of capabilities, but says
 * of an unknown path that it is unknown, whatever state the VM is in.
 */
import { err, ok, type Result } from '../result.ts';
import { instanceInfo, type MachineConfig, type RunState } from './answers.ts';
import { faultText, isSuccess, type VmmClient } from './client.ts';
import { vmmError, type VmmError } from './errors.ts';
import { checked, parseExact } from './exact-json.ts';

export const dialects = ['firecracker', 'aenv', 'e2b'] as const;
export type Dialect = (typeof dialects)[number];

/** What this VMM offers. Recorded at attach; shown by the API. */
export interface VmmCapabilities {
  /** `GET /vm/dirty-memory-ranges`. */
  readonly dirtyRanges: boolean;
  /** `GET /memory/mappings`: where each region is mapped. */
  readonly memoryMappings: boolean;
  /** `GET /memory/dirty`: one bit per page. */
  readonly dirtyBitmap: boolean;
  /** `PUT /vm/dirty-epoch`: begin, commit, abort (docs/vmm-epochs.md). */
  readonly dirtyEpochs: boolean;
  /** Pages may be taken from the guest (a balloon), or the VMM does not say that they are not. */
  readonly removesPages: boolean;
  /** `snapshot/create` without a memory file saves the VM state alone. From the dialect. */
  readonly stateOnlySnapshot: boolean;
  /** Reading the dirty set resets it. From the dialect. */
  readonly clearsOnRead: boolean;
}

export interface VmmFacts {
  readonly dialect: Dialect;
  readonly version: string;
  readonly id: string;
  readonly appName: string;
  readonly state: RunState;
  readonly capabilities: VmmCapabilities;
  readonly machineConfig: MachineConfig;
}

/** From the dialect alone, where asking would change something. */
export const dialectTable = {
  firecracker: { stateOnlySnapshot: false, clearsOnRead: true },
  aenv: { stateOnlySnapshot: true, clearsOnRead: false },
  e2b: { stateOnlySnapshot: true, clearsOnRead: false },
} as const satisfies Record<Dialect, { stateOnlySnapshot: boolean; clearsOnRead: boolean }>;

/** Asks everything once. Changes nothing in the VM. */
export async function probeVmm(
  client: VmmClient,
  signal: AbortSignal,
): Promise<Result<VmmFacts, VmmError>> {
  const info = await firstAnswer(client, signal);
  if (!info.ok) return info;
  const machineConfig = await client.machineConfig(signal);
  if (!machineConfig.ok) return machineConfig;
  const asked: Record<string, boolean> = {};
  for (const path of [
    '/vm/dirty-memory-ranges',
    '/memory/mappings',
    '/memory/dirty',
    '/vm/dirty-epoch',
  ]) {
    const offered = await offers(client, path, signal);
    if (!offered.ok) return offered;
    asked[path] = offered.value;
  }
  const removes = await removesPages(client, signal);
  if (!removes.ok) return removes;
  const dirtyRanges = asked['/vm/dirty-memory-ranges'] === true;
  const mappings = asked['/memory/mappings'] === true;
  const dirtyBitmap = asked['/memory/dirty'] === true;
  const dialect = dirtyRanges ? 'aenv' : mappings && dirtyBitmap ? 'e2b' : 'firecracker';
  return ok({
    dialect,
    version: info.value.vmm_version,
    id: info.value.id,
    appName: info.value.app_name,
    state: info.value.state,
    machineConfig: machineConfig.value,
    capabilities: {
      dirtyRanges,
      memoryMappings: mappings,
      dirtyBitmap,
      dirtyEpochs: asked['/vm/dirty-epoch'] === true,
      // Before boot, a balloon may still be added.
      removesPages: removes.value || info.value.state === 'Not started',
      ...dialectTable[dialect],
    },
  });
}

/** `GET /`, where whatever is no Firecracker API is told from one that is broken. */
async function firstAnswer(client: VmmClient, signal: AbortSignal): ReturnType<VmmClient['info']> {
  const { socketPath } = client;
  const answer = await client.ask(
    { method: 'GET', path: '/', timeoutMs: client.timeoutsMs.queryMs, answerBytesMax: 65_536 },
    signal,
  );
  if (!answer.ok) {
    const tooLong = answer.error.kind === 'vmm-bad-answer';
    return tooLong ? err(notVmm(socketPath, answer.error.message)) : answer;
  }
  const what = `GET / at ${socketPath}`;
  if (!isSuccess(answer.value.status)) {
    return err(notVmm(socketPath, `GET / has status ${answer.value.status}`));
  }
  const parsed = parseExact(answer.value.body.toString('utf8'), what);
  if (!parsed.ok) return err(notVmm(socketPath, parsed.error.message));
  const value = parsed.value;
  const looksLikeOne = typeof value === 'object' && value !== null && 'vmm_version' in value;
  if (!looksLikeOne) return err(notVmm(socketPath, 'GET / does not name a vmm_version'));
  return checked(instanceInfo, value, what);
}

function notVmm(socketPath: string, why: string): VmmError {
  const message = `${socketPath} is not the API socket of a Firecracker VMM: ${why}`;
  return vmmError('vmm-not-a-vmm', message, { socketPath });
}

/**
 * Firecracker knows `/balloon` and refuses it where there is no such device. A VMM that does not
 * know the path may have other ways to take pages away.
 */
async function removesPages(
  client: VmmClient,
  signal: AbortSignal,
): Promise<Result<boolean, VmmError>> {
  const path = '/balloon';
  const { queryMs } = client.timeoutsMs;
  const answer = await client.ask(
    { method: 'GET', path, timeoutMs: queryMs, answerBytesMax: 65_536 },
    signal,
  );
  if (!answer.ok) return answer;
  const { status, body } = answer.value;
  return ok(status !== 400 || /invalid request method/i.test(faultText(body)));
}

/** Whether the VMM knows the path. Of a long answer only the start is read. */
async function offers(
  client: VmmClient,
  path: string,
  signal: AbortSignal,
): Promise<Result<boolean, VmmError>> {
  const answer = await client.ask(
    {
      method: 'GET',
      path,
      timeoutMs: client.timeoutsMs.bulkMs,
      answerBytesMax: 4096,
      truncate: true,
    },
    signal,
  );
  if (!answer.ok) return answer;
  const { status, body } = answer.value;
  if (isSuccess(status)) return ok(true);
  if (status === 404 || status === 405 || status === 501) return ok(false);
  if (status >= 400 && status < 500) return ok(!saysUnknownPath(faultText(body)));
  const fault = faultText(body);
  const message = `the VMM at ${client.socketPath} answered GET ${path} with ${status}: ${fault}`;
  return err(vmmError('vmm-refused', message, { socketPath: client.socketPath, status, fault }));
}

/**
 * Firecracker answers 400 to both an unknown path and a known one that is not due; only the words
 * differ.
 */
function saysUnknownPath(fault: string): boolean {
  return /invalid request method and\/or path|unknown endpoint|no such endpoint|not found/i.test(
    fault,
  );
}

/**
 * Turns on dirty tracking where that is still possible. Fine where it is on; `tracking-off` for a
 * VM that booted without it.
 */
export async function enableTracking(
  client: VmmClient,
  signal: AbortSignal,
): Promise<Result<void, VmmError>> {
  const info = await client.info(signal);
  if (!info.ok) return info;
  const config = await client.machineConfig(signal);
  if (!config.ok) return config;
  if (config.value.track_dirty_pages) return ok(undefined);
  if (info.value.state !== 'Not started') return err(trackingOff(client.socketPath));
  return client.patchMachineConfig({ track_dirty_pages: true }, signal);
}

export function trackingOff(socketPath: string): VmmError {
  const message =
    `the VM at ${socketPath} runs with track_dirty_pages = false, so its dirty set would ` +
    'miss writes; attach it before boot, load its snapshot with track_dirty_pages, or use ' +
    'tracking mode mincore';
  return vmmError('tracking-off', message, { socketPath });
}
