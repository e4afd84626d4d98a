/**
 * The VMM's own epochs (docs/vmm-epochs.md). `begin` freezes the dirty set and starts the next one;
 * `commit` drops the frozen set, `abort` gives it back. A source begins one at each fetch, after
 * aborting one that was left open: whoever forgets to commit gets larger sets, never smaller ones.
 *
 * | state | begin   | commit  | abort                    |
 * |-------|---------|---------|--------------------------|
 * | idle  | open    | refused | refused                  |
 * | open  | refused | idle    | idle, set ∪ newer writes |
 */
import { z } from 'zod';
import { err, ok, type Result } from '../result.ts';
import type { VmmClient } from './client.ts';
import type { VmmError } from './errors.ts';
import { safeCount } from './exact-json.ts';

const epochStatus = z.object({ epoch: safeCount, open: z.boolean() });
/** `epoch` counts commits. */
export type EpochStatus = z.infer<typeof epochStatus>;

const path = '/vm/dirty-epoch';

export class VmmEpochs {
  readonly #client: VmmClient;

  constructor(client: VmmClient) {
    this.#client = client;
  }

  status(signal: AbortSignal): Promise<Result<EpochStatus, VmmError>> {
    return this.#client.query(path, epochStatus, signal);
  }

  /** For sources. The VM may run: then the sets are those of one moment. An epoch that was left open is aborted first. */
  async begin(signal: AbortSignal): Promise<Result<void, VmmError>> {
    const status = await this.status(signal);
    if (!status.ok) return err(status.error);
    if (status.value.open) {
      const aborted = await this.abort(signal);
      if (!aborted.ok) return aborted;
    }
    return this.#client.change('PUT', path, { action: 'begin' }, signal);
  }

  /** What the last fetch named is in a committed layer. Idle: nothing to do. */
  async commit(signal: AbortSignal): Promise<Result<void, VmmError>> {
    return this.#end('commit', signal);
  }

  /** What the last fetch named stays dirty. Idle: nothing to do. */
  async abort(signal: AbortSignal): Promise<Result<void, VmmError>> {
    return this.#end('abort', signal);
  }

  async #end(action: 'commit' | 'abort', signal: AbortSignal): Promise<Result<void, VmmError>> {
    const status = await this.status(signal);
    if (!status.ok) return err(status.error);
    if (!status.value.open) return ok(undefined);
    return this.#client.change('PUT', path, { action }, signal);
  }
}
