/**
 * Stops the VM. In: the request. Out: the paused VM. A VM that its owner had already paused is left
 * as it is, and stays paused at the end. Fails: what the VMM client fails with; never retries.
 */
import type { Freeze } from '../pipeline/freeze.ts';
import type { Stage } from '../pipeline/stage.ts';
import type { CaptureStart, PausedVm } from './items.ts';

export interface PauseDeps {
  readonly freeze: Freeze;
  /** Whether the VM is paused now, and not by us. */
  readonly pausedByOwner: () => Promise<boolean>;
}

export function pauseVm(deps: PauseDeps): Stage<CaptureStart, PausedVm> {
  return {
    name: 'pause',
    async *run(input, { meter, signal }) {
      for await (const { captureId } of input) {
        signal.throwIfAborted();
        const pausedByUs = await meter.item(0, async () => {
          if (await deps.pausedByOwner()) return false;
          await deps.freeze.begin();
          return true;
        });
        meter.end();
        yield { captureId, pausedByUs };
      }
    },
  };
}
