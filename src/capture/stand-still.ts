/**
 * A capture is good only if its guest stood still from the saved state to the last byte read: what
 * is asked for that, and when (ADR 0046).
 */
import { Failure, type FailureDetail } from '../result.ts';
import { requirePaused } from '../vmm/process-source.ts';
import type { FetchedSet } from '../vmm/source.ts';
import type { Composition } from './compose.ts';

export interface StandStill {
  readonly stateSaved: (signal: AbortSignal) => Promise<void>;
  /**
   * After the last byte, and before our own resume. Throws `vm-ran` once; when it has passed, the VM
   * may run, and it passes ever after.
   */
  readonly stoodStill: (signal: AbortSignal) => Promise<void>;
  /** `fetch`, where a refusal may be because the VM does not stand any more: then `vm-ran`. */
  readonly orRan: (fetch: () => Promise<FetchedSet>, signal: AbortSignal) => Promise<FetchedSet>;
}

export function standStill(c: Composition): StandStill {
  const { still } = c.prepared;
  const { client } = c.vm;
  let passed = false;
  return {
    stateSaved: (signal) => still.saved(signal),
    stoodStill: async (signal) => {
      if (passed) return;
      // A VM that waits for nothing else is not kept for a question that the counts have answered.
      const waits = c.resumeAfter === 'copy' && c.freeze.state === 'paused';
      if (!waits || !still.counts) await requirePaused(client, signal);
      still.verify();
      passed = true;
    },
    orRan: async (fetch, signal) => {
      try {
        return await fetch();
      } catch (error) {
        const refused =
          error instanceof Failure && (error.detail as FailureDetail).kind === 'vmm-refused';
        if (refused) await requirePaused(client, signal).catch(throwIfRan);
        throw error;
      }
    },
  };
}

function throwIfRan(error: unknown): void {
  if (error instanceof Failure && (error.detail as FailureDetail).kind === 'vm-ran') throw error;
}
