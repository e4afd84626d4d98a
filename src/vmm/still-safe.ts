/**
 * What a tracking mode rests on may change after the attach: a VM that was attached before its boot
 * may boot, or load a snapshot, with other tracking (a snapshot does not keep it), and a host may be
 * given swap. Asked again before each pause.
 */
import { err, ok, type Result } from '../result.ts';
import type { VmmClient } from './client.ts';
import type { VmmError } from './errors.ts';
import { trackingOff } from './probe.ts';
import type { TrackingMode } from './source.ts';
import { checkSwap, type SwapArea } from './swap.ts';

/** `track_dirty_pages` of the VM now; `tracking-off` where the mode needs it on. */
export async function trackingNow(
  client: VmmClient,
  mode: TrackingMode,
  signal: AbortSignal,
): Promise<Result<boolean, VmmError>> {
  const config = await client.machineConfig(signal);
  if (!config.ok) return config;
  const tracked = config.value.track_dirty_pages;
  return mode === 'dirty' && !tracked ? err(trackingOff(client.socketPath)) : ok(tracked);
}

/** `swap-on` where mode `mincore` would lose swapped pages. */
export async function requireNoSwap(
  source: { readonly kind: TrackingMode; readonly seesSwapped: boolean },
  readSwaps: () => Promise<readonly SwapArea[]>,
): Promise<Result<void, VmmError>> {
  if (source.kind !== 'mincore' || source.seesSwapped) return ok(undefined);
  return checkSwap(await readSwaps(), false);
}
