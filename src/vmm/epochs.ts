/**
 * The VMM's own epochs (docs/vmm-epochs.md): begin, commit and abort of a dirty set, in the VMM.
 */
import type { Result } from '../result.ts';
import type { VmmError } from './errors.ts';

export interface VmmEpochs {
  begin(signal: AbortSignal): Promise<Result<void, VmmError>>;
  commit(signal: AbortSignal): Promise<Result<void, VmmError>>;
  abort(signal: AbortSignal): Promise<Result<void, VmmError>>;
}
