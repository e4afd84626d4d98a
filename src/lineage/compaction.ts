/**
 * Keeps memory parents short, outside any pause and beside running captures: as an LSM tree does, by
 * merging the newest run (compaction-plan.ts) and swapping it in (K1 to K4 of compactions.queries.ts).
 *
 * A capture that commits while its run is merged puts a layer on the old head. That layer is then
 * merged too, onto what was made so far, so that its copy names the new layer below it. Each such round
 * copies only what came during the last one; from the second on, captures wait at `admit`, before their
 * pause, for the moment that it takes. They also wait while the chain is at its length and a compaction
 * is under way, so that it never grows past it unless compactions fail.
 */
import { randomUUID } from 'node:crypto';
import { unlink } from 'node:fs/promises';
import { join } from 'node:path';
import type { Clock } from '../clock.ts';
import { crashPoint } from '../crash-points.ts';
import { assert, err, ok, systemCode } from '../result.ts';
import type { FailureDetail, Result } from '../result.ts';
import { bytes, layerUuid } from '../units.ts';
import type { Bytes, LayerUuid, VmId } from '../units.ts';
import { planRun, sharedDepth } from './compaction-plan.ts';
import type { ChainRef, LayerRef, LocalLayer } from './layers.queries.ts';
import { deleteUnneededLayers } from './local-files.ts';
import type { NodeDb } from './node-db.ts';

export interface MergeRequest {
  /** Bottom to top. */
  readonly run: readonly LocalLayer[];
  /** What the new layer will sit on, bottom to top. */
  readonly below: readonly LayerRef[];
  readonly uuid: LayerUuid;
  readonly path: string;
  readonly signal: AbortSignal;
}

/** Writes one sealed layer that reads, on top of `below`, as the run does. Fails without a file. */
export type MergeRun = (request: MergeRequest) => Promise<Result<LayerRef, FailureDetail>>;

export interface CompactionReport {
  readonly vmId: VmId;
  readonly depthBefore: number;
  readonly depthAfter: number;
  readonly layersMerged: number;
  /** Sizes of the files that were merged. */
  readonly readBytes: Bytes;
  /** Guest bytes written again. */
  readonly rewrittenBytes: Bytes;
  readonly tookMs: number;
}

export interface CompactorOptions {
  readonly db: NodeDb;
  readonly merge: MergeRun;
  /** Where new layers go. */
  readonly layersFolder: string;
  /** `lineage.max_chain`: how many layers a memory parent may have. */
  readonly maxChain: number;
  readonly clock: Clock;
  readonly onCompacted?: (report: CompactionReport) => void;
  /** Told of each failure; the next commit of the VM tries again. */
  readonly onFailed?: (vmId: VmId, failure: FailureDetail) => void;
}

/** How long to wait for a capture to end before looking by oneself, milliseconds. */
const lookAgainMs = 200;

interface Work {
  /** Captures wait while it is set. */
  gate: boolean;
  readonly done: Promise<void>;
}

interface Made {
  readonly layer: LayerRef;
  readonly generation: number;
}

export class Compactor implements AsyncDisposable {
  readonly #options: CompactorOptions;
  readonly #work = new Map<VmId, Work>();
  readonly #stopping = new AbortController();
  readonly #waiting = new Map<VmId, Set<() => void>>();
  /** One merge at a time in the whole daemon. */
  #turn: Promise<unknown> = Promise.resolve();

  constructor(options: CompactorOptions) {
    assert(options.maxChain >= 2, 'a chain has room for a base and one layer');
    this.#options = options;
  }

  /** At this length a compaction begins: some places are left for captures that come meanwhile. */
  get startDepth(): number {
    const { maxChain } = this.#options;
    return Math.max(2, maxChain - Math.min(4, Math.floor(maxChain / 4)));
  }

  /** After a commit, and for each VM at start-up. Returns at once. */
  check(vmId: VmId): void {
    this.#wake(vmId);
    if (this.#work.has(vmId) || this.#stopping.signal.aborted) return;
    const depth = this.#options.db.memoryChain(vmId)?.depth ?? 0;
    if (depth < this.startDepth) return;
    const done = this.#turn.then(() => this.#run(vmId));
    this.#turn = done;
    this.#work.set(vmId, { gate: false, done });
  }

  /** After a capture of the VM aborted. */
  captureEnded(vmId: VmId): void {
    this.#wake(vmId);
  }

  /** Before a capture's intent: resolves at once, unless a compaction needs it to wait. */
  async admit(vmId: VmId, signal: AbortSignal): Promise<void> {
    while (this.#mustWait(vmId)) {
      signal.throwIfAborted();
      await this.#woken(vmId, signal);
    }
  }

  /** Resolves when nothing is being compacted for the VM. */
  async idle(vmId: VmId): Promise<void> {
    await this.#work.get(vmId)?.done;
  }

  /** Ends what runs; it leaves no file. */
  async close(): Promise<void> {
    this.#stopping.abort(new Error('the daemon is stopping'));
    for (const vmId of this.#waiting.keys()) this.#wake(vmId);
    await Promise.all([...this.#work.values()].map((work) => work.done));
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  #mustWait(vmId: VmId): boolean {
    const work = this.#work.get(vmId);
    if (work === undefined || this.#stopping.signal.aborted) return false;
    return work.gate || (this.#options.db.memoryChain(vmId)?.depth ?? 0) >= this.#options.maxChain;
  }

  /** Never rejects: the next turn begins after it. */
  async #run(vmId: VmId): Promise<void> {
    const { db, onCompacted, onFailed } = this.#options;
    const outcome = await this.#compact(vmId).catch(bug);
    this.#work.delete(vmId);
    this.#wake(vmId);
    if (outcome.ok && outcome.value !== null) onCompacted?.(outcome.value);
    if (!outcome.ok && !this.#stopping.signal.aborted) onFailed?.(vmId, outcome.error);
    const deleted = await deleteUnneededLayers(db).catch(bug);
    if (!deleted.ok) onFailed?.(vmId, deleted.error);
  }

  async #compact(vmId: VmId): Promise<Result<CompactionReport | null, FailureDetail>> {
    const { db, clock } = this.#options;
    const began = clock.monotonicNs();
    const id = randomUUID();
    const begun = db.beginCompaction(vmId, id);
    if (!begun.ok) return begun;
    const chain = begun.value;
    const launchDepth = sharedDepth(chain.layers, db.launchChain(vmId)?.layers ?? []);
    const plan = planRun(chain.layers, this.startDepth, launchDepth);
    const outcome =
      plan === null ? ok(null) : await this.#mergeAndSwap(vmId, id, chain, plan.first).catch(bug);
    if (!outcome.ok || outcome.value === null) {
      const cleaned = await this.#abandon(vmId, id);
      return cleaned.ok ? outcome : cleaned;
    }
    const { made, after, merged } = outcome.value;
    return ok({
      vmId,
      depthBefore: chain.depth,
      depthAfter: after.depth,
      layersMerged: merged.length,
      readBytes: bytes(merged.reduce((sum, layer) => sum + layer.sizeBytes, 0)),
      rewrittenBytes: bytes(made.reduce((sum, { layer }) => sum + (layer.dataBytes ?? 0), 0)),
      tookMs: Number(clock.monotonicNs() - began) / 1e6,
    });
  }

  async #mergeAndSwap(
    vmId: VmId,
    id: string,
    chain: ChainRef,
    first: number,
  ): Promise<Result<{ made: Made[]; after: ChainRef; merged: LocalLayer[] }, FailureDetail>> {
    const { db } = this.#options;
    const below: LayerRef[] = chain.layers.slice(0, first);
    const made: Made[] = [];
    let run = chain.layers.slice(first);
    let covers = chain.head;
    const merged: LocalLayer[] = [];
    for (;;) {
      if (run.length > 0) {
        if (made.length > 1) this.#closeGate(vmId);
        const output = await this.#mergeOne(id, run, below);
        if (!output.ok) return output;
        made.push(output.value);
        below.push(output.value.layer);
        covers = run.at(-1)?.uuid ?? covers;
        merged.push(...run);
      }
      crashPoint('compaction-merged');
      const swapped = db.swapChain(id, { covers, layers: made });
      if (swapped.ok) crashPoint('compaction-swapped');
      if (swapped.ok) return ok({ made, after: swapped.value, merged });
      if (this.#stopping.signal.aborted) return swapped;
      if (swapped.error.kind === 'capture-running') {
        this.#closeGate(vmId);
        await this.#woken(vmId, this.#stopping.signal);
        run = [];
      } else if (swapped.error.kind === 'chain-moved') {
        const newer = this.#above(vmId, id, covers);
        if (!newer.ok) return newer;
        run = newer.value;
      } else {
        return swapped;
      }
    }
  }

  /** Layers that were committed on top meanwhile, leased from now on. */
  #above(vmId: VmId, id: string, covers: LayerUuid): Result<LocalLayer[], FailureDetail> {
    const { db } = this.#options;
    const chain = db.memoryChain(vmId);
    const at = chain?.layers.findIndex((layer) => layer.uuid === covers) ?? -1;
    if (chain === null || at < 0) {
      return err({ kind: 'chain-moved', message: `VM ${vmId} left the chain being compacted` });
    }
    const leased = db.takeLease('compaction', id, chain.head);
    return leased.ok ? ok(chain.layers.slice(at + 1)) : leased;
  }

  async #mergeOne(
    id: string,
    run: readonly LocalLayer[],
    below: readonly LayerRef[],
  ): Promise<Result<Made, FailureDetail>> {
    const { db, layersFolder, merge } = this.#options;
    const { signal } = this.#stopping;
    const uuid = layerUuid(randomUUID());
    const path = join(layersFolder, `${uuid}.lsmt`);
    const named = db.addCompactionFile(id, path);
    if (!named.ok) return named;
    const output = await merge({ run, below: [...below], uuid, path, signal });
    if (!output.ok) return output;
    assert(
      output.value.parentUuid === (below.at(-1)?.uuid ?? null),
      'K1: it sits on what is below',
    );
    const generation = Math.max(...run.map((layer) => layer.generation)) + 1;
    const complete = run.some((layer) => layer.complete);
    return ok({ layer: { ...output.value, complete }, generation });
  }

  /** A file that cannot be removed must not keep the VM from its next compaction. */
  async #abandon(vmId: VmId, id: string): Promise<Result<void, FailureDetail>> {
    const { db, onFailed } = this.#options;
    const paths =
      db.pendingCompactions().find((row) => row.compactionId === id)?.scratchPaths ?? [];
    for (const path of paths) {
      try {
        await unlink(path);
      } catch (error) {
        if (systemCode(error) === 'ENOENT') continue;
        const message = `could not remove ${path}, which goes at the next start: ${String(error)}`;
        onFailed?.(vmId, { kind: 'layer-io', message });
      }
    }
    return db.abandonCompaction(id);
  }

  #closeGate(vmId: VmId): void {
    const work = this.#work.get(vmId);
    if (work !== undefined) work.gate = true;
  }

  #wake(vmId: VmId): void {
    const waiting = this.#waiting.get(vmId);
    this.#waiting.delete(vmId);
    for (const wake of waiting ?? []) wake();
  }

  /** Something about the VM changed, the signal aborted, or it is time to look by oneself. */
  async #woken(vmId: VmId, signal: AbortSignal): Promise<void> {
    const waiting = this.#waiting.get(vmId) ?? new Set();
    this.#waiting.set(vmId, waiting);
    // Not `AbortSignal.any`: on Node 20 a signal that lives long keeps something of every one made.
    const end = new AbortController();
    const stop = (): void => end.abort();
    signal.addEventListener('abort', stop, { once: true });
    if (signal.aborted) stop();
    let wake: () => void = () => undefined;
    const called = new Promise<void>((resolve) => {
      wake = resolve;
      waiting.add(resolve);
    });
    const slept = this.#options.clock.sleep(lookAgainMs, end.signal).catch(() => undefined);
    await Promise.race([called, slept]);
    end.abort();
    signal.removeEventListener('abort', stop);
    waiting.delete(wake);
  }
}

function bug(error: unknown): Result<never, FailureDetail> {
  return err({ kind: 'internal', message: String(error) });
}
