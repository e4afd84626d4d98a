/**
 * Makes a VM run. An error is no proof that it does not: an answer may be lost, or speak of an error
 * after the vCPUs were let go. So the VM's state is asked, and one that runs is resumed.
 */
import { ok, type Result } from '../result.ts';
import type { VmmClient } from './client.ts';
import type { VmmError } from './errors.ts';

/** One resume, for every caller that sends one. Fails as the resume, where the VM does not run. */
export async function letRun(
  client: Pick<VmmClient, 'resume' | 'state'>,
  signal: AbortSignal,
): Promise<Result<void, VmmError>> {
  const resumed = await client.resume(signal);
  if (resumed.ok || isGone(resumed.error)) return resumed;
  const state = await client.state(signal);
  return state.ok && state.value === 'Running' ? ok(undefined) : resumed;
}

/** Nothing is left that could run. */
export function isGone({ kind }: { readonly kind: string }): boolean {
  return kind === 'vm-exited' || kind === 'vm-replaced';
}
