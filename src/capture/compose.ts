/**
 * The stages of one capture as one stream: pause → dirty-bitmap → coalesce → read → compact →
 * commit → publish → resume, with a bounded queue wherever both sides work at the same time. Rounds
 * of pre-copy take the way from coalesce to commit before the pause begins.
 */
import { randomUUID } from 'node:crypto';
import type { Clock } from '../clock.ts';
import type { Config } from '../config/schema.ts';
import type { SealedLayer } from '../layer/layer-writer.ts';
import type { PageSets } from '../lineage/page-sets.ts';
import { bitmapCount } from '../native/guest.ts';
import type { Freeze } from '../pipeline/freeze.ts';
import type { StageMeter } from '../pipeline/meter.ts';
import { InFlight } from '../pipeline/in-flight.ts';
import { buffer, one, type BufferOptions, type StageContext } from '../pipeline/stage.ts';
import { Failure, type Result } from '../result.ts';
import type { StageName } from '../stage-names.ts';
import { coalesceRanges } from '../stages/coalesce.ts';
import { commitLayer, releaseTo } from '../stages/commit.ts';
import { compactPages } from '../stages/compact.ts';
import { fetchDirtyBitmap } from '../stages/dirty-bitmap.ts';
import { pauseVm } from '../stages/pause.ts';
import { publishSnapshot, type Published, type PublishFailure } from '../stages/publish.ts';
import { readPages } from '../stages/read.ts';
import { resumeVm } from '../stages/resume.ts';
import { contentId, snapshotId, type CaptureId } from '../units.ts';
import { identityError } from '../vmm/identity.ts';
import type { ShadowReport } from '../vmm/shadow.ts';
import type { FetchedSet } from '../vmm/source.ts';
import type { Engine, Seat } from './engine.ts';
import { orThrow } from './failure.ts';
import { copyAhead, type CopyAhead } from './copy-ahead.ts';
import type { CaptureObserver } from './observer.ts';
import type { Prepared } from './preparation.ts';
import type { NewEntry } from './prepared-entries.ts';
import type { PublishPlan } from './publish-plan.ts';
import { takeState, removeLeftovers, type LazyFile } from './staging.ts';
import { standStill, type StandStill } from './stand-still.ts';
import type { CaptureRequest, ResumeAfter } from './types.ts';
import { foundRight, type Verification, type VerifyReport } from './verify.ts';
import type { VmHandle } from './vm-handle.ts';

/** What the stages count for the result. */
export class Counts {
  selectedPages = 0;
  zeroPages = 0;
  equalPages = 0;
  precopyRounds = 0;
  precopiedPages = 0;
  shadow: ShadowReport | null = null;
  verify: VerifyReport | null = null;
}

export interface Composition {
  readonly vm: VmHandle;
  readonly captureId: CaptureId;
  readonly request: CaptureRequest;
  readonly resumeAfter: ResumeAfter;
  readonly config: Config;
  readonly clock: Clock;
  readonly observer: CaptureObserver;
  readonly engine: Engine;
  readonly seat: Seat;
  readonly prepared: Prepared;
  readonly freeze: Freeze;
  readonly meters: ReadonlyMap<StageName, StageMeter>;
  readonly counts: Counts;
  /** Set where every page that the dirty set does not name is compared too. */
  readonly verification: Verification | null;
  readonly entry: NewEntry | null;
  readonly memoryFile: LazyFile;
  /** Aborts everything before the commit point. */
  readonly signal: AbortSignal;
  /** Ends what comes after it. */
  readonly stopping: AbortSignal;
  /** The dirty set is about to be read. */
  readonly fetching: () => void;
  readonly joinSet: (fetched: FetchedSet) => PageSets;
  readonly recordSet: (fetched: FetchedSet) => Promise<void>;
  /** Joins the set of a round of pre-copy with the ledger, durable. */
  readonly recordRound: (sets: PageSets) => Promise<PageSets>;
  /** To be recorded when `recorded` is called first, at the latest when the capture ends. */
  readonly recordLater: (fetched: FetchedSet) => void;
  readonly recorded: () => Promise<void>;
  /** Resolves when the VM runs again, or at once where it must not yet. */
  readonly copied: () => Promise<void>;
  /** From now until the commit point, the file at this path must go if the capture aborts. */
  readonly sealing: (path: string) => void;
  readonly commitEpoch: (sealed: SealedLayer, plan: PublishPlan) => void;
  readonly committed: () => Promise<void>;
  readonly vmStatePath: () => string | null;
  /** The VM's state is ours now, in this file. */
  readonly tookState: (path: string) => void;
  readonly publishOnce: (
    plan: PublishPlan,
    layer: SealedLayer,
    signal: AbortSignal,
  ) => Promise<Result<Published, PublishFailure>>;
  readonly publishFailed: (failure: PublishFailure) => void;
}

export function composeStages(c: Composition): AsyncIterable<Published> {
  const { pipeline, memorySnapshot } = c.config;
  const inFlight = new InFlight();
  const before = (stage: StageName): StageContext => ({
    signal: c.signal,
    meter: meterOf(c, stage),
    failed: (error) => inFlight.fail(error),
  });
  const after = (stage: StageName): StageContext => ({
    signal: c.stopping,
    meter: meterOf(c, stage),
  });
  const ahead = copyAhead(c, (signal) => inFlight.drained(signal));
  const copyFirst = c.resumeAfter === 'copy' ? new HoldBack() : undefined;
  const freezes = (): void => copyFirst?.begin(c.seat.slabs.runsShort());
  const plan = once(() => planOf(c));
  const still = standStill(c);
  const paused = pauseStage(c).run(one({ captureId: c.captureId }), before('pause'));
  const frozen = dirtyBitmapStage(c, still, copyFirst, ahead).run(paused, before('dirty-bitmap'));
  if (ahead === null) freezes();
  const sets = ahead === null ? frozen : inTurn(ahead.sets, freezes, frozen);
  const ranges = coalesceRanges({
    batchBytes: pipeline.coalesce.batchBytes,
    batchRanges: Math.min(pipeline.coalesce.batchRanges, pipeline.read.batchIovecs),
    joinGapPages: pipeline.coalesce.joinGapPages,
  }).run(sets, before('coalesce'));
  const pages = readStage(c, still, copyFirst?.copied).run(
    queued(c, 'read', pipeline.coalesce.queueMax, counted(ranges, inFlight)),
    before('read'),
  );
  const segments = compactPages(
    {
      inFlightMax: pipeline.compact.concurrency,
      compression: memorySnapshot.compression,
      blockBytes: memorySnapshot.blockBytes,
    },
    {
      pool: c.seat.pool,
      slabs: c.seat.slabs,
      compressedSlabs: c.seat.compressedSlabs,
      hasParent: c.prepared.predecessor !== null,
      dedupAgainst: c.prepared.dedupAgainst,
      verify:
        c.verification === null
          ? null
          : { stack: c.verification.stack, found: (rows) => c.verification?.found(rows) },
      count: (n) => {
        c.counts.zeroPages += n.zeroPages;
        c.counts.equalPages += n.equalPages;
      },
    },
  ).run(
    // While the VM must stay frozen for the copy, nothing competes with it for CPU until slabs run
    // short.
    queued(c, 'compact', copyFirst === undefined ? pipeline.read.queueMax : Infinity, pages, {
      holdUntil: copyFirst === undefined ? undefined : () => copyFirst.until,
    }),
    before('compact'),
  );
  const committed = commitStage(c, plan, () => inFlight.arrived()).run(
    queued(c, 'commit', pipeline.compact.queueMax, segments),
    before('commit'),
  );
  const published = publishStage(c, plan).run(committed, after('publish'));
  return resumeVm({ freeze: c.freeze }).run(published, after('resume'));
}

function meterOf(c: Composition, stage: StageName): StageMeter {
  const meter = c.meters.get(stage);
  if (meter === undefined) throw new Error(`no meter for ${stage}`);
  return meter;
}

function queued<T>(
  c: Composition,
  name: string,
  max: number,
  source: AsyncIterable<T>,
  options: Pick<BufferOptions<T>, 'holdUntil'> = {},
): AsyncIterable<T> {
  return buffer(source, { max, weightOf: () => 1, gauge: c.observer.queue(name), ...options });
}

/** The ids of a publish are chosen once. */
function once<T>(make: () => T): () => T {
  let made: { readonly value: T } | undefined;
  return () => (made ??= { value: make() }).value;
}

/** `first` to its end, and only then `second`. */
async function* inTurn<T>(
  first: AsyncIterable<T>,
  between: () => void,
  second: AsyncIterable<T>,
): AsyncIterable<T> {
  yield* first;
  between();
  yield* second;
}

async function* counted<T>(items: AsyncIterable<T>, inFlight: InFlight): AsyncIterable<T> {
  for await (const item of items) {
    inFlight.sent();
    yield item;
  }
}

/**
 * From the pause until everything is copied, or slabs run short and must be emptied for the copy to
 * go on.
 */
class HoldBack {
  readonly copied: () => void;
  readonly #copied: Promise<void>;
  #until: Promise<void> | null = null;

  constructor() {
    let copied: () => void = () => undefined;
    this.#copied = new Promise((resolve) => (copied = resolve));
    this.copied = copied;
  }

  begin(runsShort: Promise<void>): void {
    this.#until = Promise.race([this.#copied, runsShort]);
  }

  /** Null before the pause. */
  get until(): Promise<void> | null {
    return this.#until;
  }
}

function pauseStage(c: Composition): ReturnType<typeof pauseVm> {
  return pauseVm({
    freeze: c.freeze,
    // Asked right before: its owner may have paused it since the capture was prepared.
    pausedByOwner: () => c.vm.isPaused(c.signal),
  });
}

/** The first reads are with the workers: what was yielded before this turn has been taken up. */
const readsAreSent = (): Promise<void> => new Promise((resolve) => void setImmediate(resolve));

function dirtyBitmapStage(
  c: Composition,
  still: StandStill,
  copyFirst: HoldBack | undefined,
  ahead: CopyAhead | null,
): ReturnType<typeof fetchDirtyBitmap> {
  const { prepared, vm } = c;
  return fetchDirtyBitmap({
    pid: vm.identity.pid,
    rounds: () => ahead?.precopied.rounds ?? 0,
    rest: (fetched, named, signal) =>
      c.verification?.rest(fetched, named, signal) ?? Promise.resolve(null),
    countPages: (bitmap) => bitmapCount(bitmap.bits),
    fetch: async (signal) => {
      using place = await c.engine.enter('dirty-bitmap', signal);
      void place;
      c.fetching();
      const request = {
        statePath: prepared.statePath,
        memFilePath: prepared.memFilePath,
        parent: ahead?.precopied.parent ?? prepared.parentPages,
        widen: prepared.intent.widen !== null,
        stateSaved: still.stateSaved,
        signal,
      };
      const fetched = await still.orRan(
        async () => orThrow(await vm.source.fetch(request)),
        signal,
      );
      noteShadow(c, fetched);
      if (fetched.bytes.kind === 'file') {
        const bytesMax = prepared.layout.imageBytes;
        await c.memoryFile.open(fetched.bytes.path, { uid: vm.identity.uid, bytesMax });
      }
      return fetched;
    },
    record: c.recordSet,
    recordLater: (fetched) => {
      c.recordLater(fetched);
      // With the VM running again, else while it waits for the pages to be read.
      void (copyFirst?.until ?? readsAreSent()).then(c.recorded).catch(() => undefined);
    },
    confirm: async (fetched, signal) => orThrow(await fetched.confirm(signal)),
    join: (fetched) => {
      const sets = c.joinSet(fetched);
      c.counts.selectedPages = bitmapCount(sets.selected.bits);
      if (ahead === null) return sets;
      const missing = ahead.precopied.missing(fetched, sets);
      c.counts.precopyRounds = ahead.precopied.rounds;
      c.counts.precopiedPages = ahead.precopied.currentPages;
      return missing;
    },
    stoodStill: still.stoodStill,
    staged: () => void c.copied().then(copyFirst?.copied),
  });
}

function noteShadow(c: Composition, { shadow }: FetchedSet): void {
  if (shadow === undefined) return;
  c.counts.shadow = shadow;
  c.observer.shadowed({ captureId: c.captureId, vmId: c.vm.vmId }, shadow);
}

function readStage(
  c: Composition,
  { stoodStill }: StandStill,
  copied: (() => void) | undefined,
): ReturnType<typeof readPages> {
  const { read } = c.config.pipeline;
  const { identity } = c.vm;
  return readPages(
    { inFlightMax: read.concurrency, noMemoryDeadlineMs: read.enomemDeadline },
    {
      pool: c.seat.pool,
      slabs: c.seat.slabs,
      cancelSlot: c.seat.cancel.slot,
      memoryFileFd: () => c.memoryFile.fd(),
      checkIdentity: () => {
        const check = identity.check();
        if (check !== 'same') throw new Failure(identityError(identity, check));
      },
      stoodStill,
      // The workers stay free until the resume is answered: compaction would slow it down.
      copied: () => void c.copied().then(copied),
    },
  );
}

function commitStage(
  c: Composition,
  plan: () => PublishPlan,
  appended: () => void,
): ReturnType<typeof commitLayer> {
  const { prepared } = c;
  return commitLayer(
    { inFlightMax: c.config.pipeline.commit.queueMax },
    {
      writer: prepared.writer,
      predecessor: prepared.predecessor,
      release: releaseTo(c.seat.slabs, c.seat.compressedSlabs),
      appended,
      recorded: c.recorded,
      syncVmState: async () => {
        const path = c.vmStatePath();
        if (path === null) return;
        const bytesMax = c.config.capture.stateMax;
        const { uid } = c.vm.identity;
        const own = await takeState(prepared.folder, path, { uid, bytesMax });
        c.tookState(own);
        await c.entry?.keepState(own);
      },
      sealing: () => c.sealing(prepared.layerPath),
      commitEpoch: (sealed) => c.commitEpoch(sealed, plan()),
      committed: async () => {
        await removeLeftovers([prepared.memFilePath], c.observer);
        await c.committed();
      },
    },
  );
}

function planOf(c: Composition): PublishPlan {
  const { prepared, vm } = c;
  return {
    snapshotId: snapshotId(randomUUID()),
    contentId: contentId(randomUUID()),
    alias: c.request.alias ?? null,
    hold: c.entry?.hold ?? null,
    retire: c.request.transient === true && foundRight(c.verification),
    createdAtMs: c.clock.nowMs(),
    vm: vm.vmId,
    epoch: prepared.intent.epoch,
    predecessor: prepared.predecessor,
    vmStatePath: c.vmStatePath(),
    stagingFolder: prepared.folder,
    imageBytes: prepared.layout.imageBytes,
    regions: prepared.layout.regions.map((region) => ({
      guestAddress: region.guestAddress?.toString() ?? null,
      imageOffset: region.imageOffset,
      length: region.length,
    })),
    vmm: {
      dialect: vm.facts.dialect,
      version: vm.facts.version,
      trackingMode: vm.source.kind,
      vcpuCount: vm.facts.machineConfig.vcpu_count,
    },
  };
}

function publishStage(c: Composition, plan: () => PublishPlan): ReturnType<typeof publishSnapshot> {
  const { publish } = c.config.pipeline;
  return publishSnapshot(
    { retryWaitMsMin: publish.retryMin, retryWaitMsMax: publish.retryMax },
    {
      clock: c.clock,
      publishOnce: async (layer, signal) => {
        using place = await c.engine.enter('publish', signal);
        void place;
        return await c.publishOnce(plan(), layer.sealed, signal);
      },
      failedOnce: c.publishFailed,
    },
  );
}
