/** Whether a capture copies ahead of its pause, and with what (`pipeline.precopy`). */
import type { PageSets } from '../lineage/page-sets.ts';
import type { SelectedSet } from '../stages/items.ts';
import { Precopied, precopyRounds } from '../stages/precopy.ts';
import { pagesExact } from '../units.ts';
import type { DirtySource } from '../vmm/source.ts';
import type { Composition } from './compose.ts';
import { orThrow } from './failure.ts';
import type { CaptureRequest, ServiceError } from './types.ts';

export interface CopyAhead {
  readonly precopied: Precopied;
  /** The sets of the rounds. */
  readonly sets: AsyncIterable<SelectedSet>;
}

/** Why a capture cannot do the rounds that its request asks for; null where it can. */
export function precopyProblem(
  { precopyRounds = 0 }: CaptureRequest,
  source: Pick<DirtySource, 'round' | 'kind' | 'dialect'>,
): ServiceError | null {
  if (precopyRounds === 0 || source.round !== null) return null;
  const message =
    `precopyRounds = ${precopyRounds}: the dirty set of this VM (dialect ${source.dialect}, mode ` +
    `${source.kind}) cannot be read while it runs; that needs mode dirty, a VMM with dirty epochs ` +
    'of its own, and no shadow check';
  return { kind: 'precopy-unsupported', message };
}

/**
 * Null where nothing is copied ahead: it is off, the source can't be asked while the VM runs, its
 * owner has paused the VM, the dirty set is lost, or it is to be verified.
 *
 * @param appended resolves when everything that the rounds yielded is in the layer's file
 */
export function copyAhead(
  c: Composition,
  appended: (signal: AbortSignal) => Promise<void>,
): CopyAhead | null {
  const { prepared, vm } = c;
  const { precopy, coalesce } = c.config.pipeline;
  const { round, epochs } = vm.source;
  const possible = round !== null && epochs !== null && !prepared.pausedByOwner;
  const rounds = c.verification === null ? (c.request.precopyRounds ?? precopy.rounds) : 0;
  if (rounds === 0 || !possible || prepared.intent.widen !== null) return null;
  const pages = pagesExact(prepared.layout.imageBytes);
  const precopied = new Precopied(prepared.parentPages, pages);
  const { bytesMax } = precopy;
  const sets = precopyRounds(
    { rounds, bytesMax, smallBytes: coalesce.batchBytes },
    {
      pid: vm.identity.pid,
      round: async (signal) => {
        using place = await c.engine.enter('dirty-bitmap', signal);
        void place;
        c.fetching();
        return orThrow(await round(signal));
      },
      record: (fresh: PageSets) => c.recordRound(fresh),
      recorded: async (signal) => {
        orThrow(await epochs.commit(signal));
      },
      appended,
    },
    precopied,
    c.signal,
  );
  return { precopied, sets };
}
