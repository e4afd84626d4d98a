/**
 * Makes a committed layer a snapshot that users see: artifacts to the store, then one catalog
 * transaction. In: the committed layer. Out: the snapshot. The epoch is committed, so it can't be
 * taken back: failures that may pass are tried again, with growing waits, until the publish
 * succeeds or the daemon stops; recovery then goes on with it.
 */
import type { Clock } from '../clock.ts';
import type { Stage } from '../pipeline/stage.ts';
import { Failure, type FailureDetail, type Result } from '../result.ts';
import type { SnapshotId } from '../units.ts';
import type { CommittedLayer } from './items.ts';

export interface PublishConfig {
  readonly retryWaitMsMin: number;
  readonly retryWaitMsMax: number;
}

export interface Published {
  readonly snapshotId: SnapshotId;
  /**
   * `alias-taken`: somebody else took the name that was asked for, after it had been found free. The
   * snapshot is published without it.
   */
  readonly aliasProblem: FailureDetail | null;
}

export interface PublishFailure extends FailureDetail {
  /**
   * False: trying again can't help. The capture stays committed, its publish is reported as failed.
   */
  readonly retryable: boolean;
}

export interface PublishDeps {
  readonly clock: Clock;
  /** Idempotent: publishing the same committed layer again finds what the first did. */
  readonly publishOnce: (
    layer: CommittedLayer,
    signal: AbortSignal,
  ) => Promise<Result<Published, PublishFailure>>;
  /** Told of each failed try. */
  readonly failedOnce: (failure: PublishFailure) => void;
}

export function publishSnapshot(
  config: PublishConfig,
  deps: PublishDeps,
): Stage<CommittedLayer, Published> {
  return {
    name: 'publish',
    async *run(input, { meter, signal }) {
      for await (const layer of input) {
        const published = await meter.item(layer.sealed.sizeBytes, () =>
          publishUntilDone(layer, config, deps, signal),
        );
        meter.end();
        yield published;
      }
    },
  };
}

async function publishUntilDone(
  layer: CommittedLayer,
  config: PublishConfig,
  deps: PublishDeps,
  signal: AbortSignal,
): Promise<Published> {
  for (let waitMs = config.retryWaitMsMin; ; waitMs = Math.min(waitMs * 2, config.retryWaitMsMax)) {
    signal.throwIfAborted();
    const published = await deps.publishOnce(layer, signal);
    if (published.ok) return published.value;
    deps.failedOnce(published.error);
    if (!published.error.retryable) throw new Failure(published.error);
    await deps.clock.sleep(waitMs, signal);
  }
}
