/**
 * Publishes committed captures: bytes to the artifact store, then one catalog transaction.
 *
 * P1: an upload intent is recorded before any byte is stored; the publish transaction removes it.
 * P2: trying again in this process stores nothing twice: keys and stored objects are remembered per
 *     capture.
 * P3: trying again after a crash first looks whether the snapshot is there: the answer may have
 *     been lost, not the work.
 * P4: captures of one VM publish one after the other, and so do those that would bring the same
 *     layer, such as a fork's source and children: a layer never goes before its predecessor, and
 *     never twice. A publish takes the unpublished layers below with it: the capture that made them
 *     then publishes on what is there.
 * P5: what was stored and turned out not to be needed is given up: by the try that finds out, or,
 *     if the daemon died, by its next life before that stores anything.
 * P6: a layer that was published and that the catalog has forgotten since, because its snapshots
 *     are gone, is published again from this node's file.
 * P7: the hold of a fork is taken by its capture's publish, if the prepared entry or a child still
 *     owns it then. If the last of them ends in between, its release is queued, and makes the hold
 *     spent or closes it.
 */
import { randomUUID } from 'node:crypto';
import { writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import { encodeManifest } from '../artifact/manifest.ts';
import type { ArtifactStore, StoredArtifact } from '../artifact/store.ts';
import type { Catalog, NewLayer, NewUpload } from '../catalog/catalog.ts';
import type { PublishRequest, Snapshot } from '../catalog/catalog.ts';
import { isName, NAME_RULE } from '../catalog/check.ts';
import type { Clock } from '../clock.ts';
import type { Config } from '../config/schema.ts';
import { crashPoint } from '../crash-points.ts';
import type { CaptureJob } from '../lineage/jobs.queries.ts';
import type { NodeDb } from '../lineage/node-db.ts';
import type { LocalLayer } from '../lineage/layers.queries.ts';
import { Failure, err, ok, type FailureDetail, type Result } from '../result.ts';
import type { Published, PublishFailure } from '../stages/publish.ts';
import { bytes, type CaptureId, type LayerUuid, type NodeId } from '../units.ts';
import { fileFacts, bytesFacts } from './file-facts.ts';
import { failureOf, orThrow } from './failure.ts';
import type { HostFacts, Virtualization } from './host-facts.ts';
import type { KeptResult } from './job-view.ts';
import { manifestOf } from './manifest-of.ts';
import type { CaptureObserver } from './observer.ts';
import { publishedAs } from './progress.ts';
import { parsePublishPlan, type PublishPlan } from './publish-plan.ts';
import { removeLeftovers } from './staging.ts';

export interface PublisherDeps {
  readonly catalog: Catalog;
  readonly store: ArtifactStore;
  readonly nodeDb: NodeDb;
  readonly nodeId: NodeId;
  readonly host: HostFacts;
  readonly virtualization: Virtualization;
  readonly observer: Pick<CaptureObserver, 'warn'>;
}

/** For what is tried until it is done. */
export interface RetryDeps {
  readonly clock: Clock;
  readonly config: Config;
  readonly observer: CaptureObserver;
}

/** An object that a try has named, and whether its bytes are in the store. */
interface Upload {
  readonly artifact: StoredArtifact;
  readonly sourcePath: string;
  stored: boolean;
}

interface Attempt {
  readonly layers: readonly { readonly layer: LocalLayer; readonly upload: Upload }[];
  vmState: Upload | null | undefined;
  manifest: Upload | undefined;
}

/** Another try brings its objects under new names; its predecessor may be there by then. */
const renamed: ReadonlySet<string> = new Set([
  'artifact-conflict',
  'artifact-exists',
  'artifact-missing',
  'layer-conflict',
  'layer-missing',
  'upload-missing',
]);

const CAPTURE_AGAIN = 'not tried again: capture the VM once more, which publishes these pages too';

/**
 * Why a publish can never be, and what to do. Whatever else fails is tried again, since the epoch is
 * committed: somebody may bring back the catalog, the node's registration, a disk or a file.
 */
const hopeless: Readonly<Record<string, string>> = {
  'catalog-closed': 'the daemon stops: its next start publishes this',
  'chain-too-deep': CAPTURE_AGAIN,
  'content-conflict': CAPTURE_AGAIN,
  'hold-conflict': CAPTURE_AGAIN,
  'request-invalid': CAPTURE_AGAIN,
  'snapshot-conflict': CAPTURE_AGAIN,
};

/** What somebody must do before another try can succeed. */
const remedies: Readonly<Record<string, string>> = {
  'source-missing': 'tried again until the file is back: mount its disk, or restore it',
  'digest-mismatch': 'tried again until the local file is whole: restore it',
};

export class Publisher {
  readonly #deps: PublisherDeps;
  readonly #attempts = new Map<CaptureId, Attempt>();
  readonly #turns = new Map<string, Promise<unknown>>();
  #earlier: Promise<void> | undefined;

  constructor(deps: PublisherDeps) {
    this.#deps = deps;
  }

  /** One try. Idempotent by the plan's ids. Rejects only where `signal` is aborted. */
  async publishOnce(
    captureId: CaptureId,
    plan: PublishPlan,
    signal: AbortSignal,
  ): Promise<Result<Published, PublishFailure>> {
    try {
      return await this.#inTurn(captureId, plan, () => this.#try(captureId, plan, signal));
    } catch (error) {
      if (signal.aborted) throw error;
      return err(publishFailureOf(error));
    }
  }

  /** P4. Whoever comes later waits; what may turn out to be brought after all, is waited for anew. */
  async #inTurn<T>(captureId: CaptureId, plan: PublishPlan, work: () => Promise<T>): Promise<T> {
    const places = (): string[] => [
      plan.vm,
      ...this.#deps.nodeDb.layersToPublish(captureId).map(({ uuid }) => uuid),
    ];
    for (;;) {
      const taken = places();
      const before = taken.flatMap((place) => this.#turns.get(place) ?? []);
      const turn = Promise.allSettled(before).then(async () => {
        if (places().some((place) => !taken.includes(place))) return null;
        return { done: await work() };
      });
      for (const place of taken) this.#turns.set(place, turn);
      try {
        const outcome = await turn;
        if (outcome !== null) return outcome.done;
      } finally {
        for (const place of taken) {
          if (this.#turns.get(place) === turn) this.#turns.delete(place);
        }
      }
    }
  }

  /**
   * P5: gives up what an earlier life of the daemon had named and not published. Done once; each
   * publish waits for it. Throws `Failure` where the catalog cannot be asked: the next publish asks
   * again.
   */
  settleEarlier(): Promise<void> {
    this.#earlier ??= this.#giveUpEarlier().catch((error: unknown) => {
      this.#earlier = undefined;
      throw error;
    });
    return this.#earlier;
  }

  /** P5 without a publish that asks for it. Ends when it is done or `signal` aborts. */
  async settleUntilDone(deps: RetryDeps, signal: AbortSignal): Promise<void> {
    const { retryMin, retryMax } = deps.config.pipeline.publish;
    let warned = false;
    for (let waitMs: number = retryMin; !signal.aborted; waitMs = Math.min(waitMs * 2, retryMax)) {
      try {
        await this.settleEarlier();
        return;
      } catch (error) {
        const what = 'what an earlier life had stored is not given up yet';
        if (!warned) deps.observer.warn(what, { error });
        warned = true;
      }
      await deps.clock.sleep(waitMs, signal).catch(() => undefined);
    }
  }

  async #giveUpEarlier(): Promise<void> {
    const { catalog, nodeId } = this.#deps;
    orThrow(await catalog.abandonUploads(nodeId, []));
  }

  /**
   * For captures that an earlier life of the daemon committed. Ends when it is done or `signal`
   * aborts.
   */
  async publishUntilDone(job: CaptureJob, deps: RetryDeps, signal: AbortSignal): Promise<void> {
    if (job.publishJson === null) throw new Error(`capture ${job.captureId} has no publish plan`);
    const plan = parsePublishPlan(job.publishJson);
    const { retryMin, retryMax } = deps.config.pipeline.publish;
    for (let waitMs: number = retryMin; !signal.aborted; waitMs = Math.min(waitMs * 2, retryMax)) {
      const published = await this.publishOnce(job.captureId, plan, signal).catch(() => null);
      // The daemon stops; the next life goes on.
      if (published === null) return;
      if (published.ok) {
        deps.observer.recovered('published');
        return;
      }
      const facts = { captureId: job.captureId, failure: published.error };
      deps.observer.warn('publishing a recovered capture failed', facts);
      if (!published.error.retryable) return;
      await deps.clock.sleep(waitMs, signal).catch(() => undefined);
    }
  }

  async #try(
    captureId: CaptureId,
    plan: PublishPlan,
    signal: AbortSignal,
  ): Promise<Result<Published, PublishFailure>> {
    const { catalog, nodeDb } = this.#deps;
    try {
      signal.throwIfAborted();
      await this.settleEarlier();
      const known = await catalog.show(plan.snapshotId);
      if (!known.ok && known.error.kind !== 'snapshot-missing') throw new Failure(known.error);
      const snapshot = known.ok ? known.value : await this.#publish(captureId, plan, signal);
      if (plan.retire) orThrow(await catalog.retire(snapshot.id));
      const published = { snapshotId: snapshot.id, aliasProblem: aliasProblem(plan, snapshot) };
      this.#keep(captureId, published);
      crashPoint('snapshot-catalogued');
      orThrow(nodeDb.published(captureId, snapshot.id));
      crashPoint('publish-recorded');
      this.#attempts.delete(captureId);
      await removeLeftovers([plan.stagingFolder], this.#deps.observer);
      return ok(published);
    } catch (error) {
      if (signal.aborted) throw error;
      const failure = publishFailureOf(error);
      await this.#failed(captureId, failure);
      return err(failure);
    }
  }

  /** P5, P6. Never rejects: what fails here must not hide why the try failed. */
  async #failed(captureId: CaptureId, { kind, retryable }: PublishFailure): Promise<void> {
    try {
      if (!retryable || renamed.has(kind)) await this.#giveUp(captureId);
      if (kind === 'layer-missing') await this.#findForgotten(captureId);
    } catch (error) {
      const facts = { captureId, error: failureOf(error) };
      this.#deps.observer.warn('after a publish failed, something else did', facts);
    }
  }

  /** Before the capture counts as published: how it was, for those who ask in a later life. */
  #keep(captureId: CaptureId, published: Published): void {
    const { nodeDb } = this.#deps;
    if (published.aliasProblem === null) return;
    const json = nodeDb.getJob(captureId)?.resultJson ?? null;
    const kept = json === null ? null : (JSON.parse(json) as KeptResult);
    if (kept?.result == null) return;
    const result = publishedAs(kept.result, published);
    orThrow(nodeDb.setResult(captureId, JSON.stringify({ ...kept, result })));
  }

  /** P5. Where the catalog cannot be asked, the next life of the daemon does it. */
  async #giveUp(captureId: CaptureId): Promise<void> {
    const attempt = this.#attempts.get(captureId);
    this.#attempts.delete(captureId);
    const uploads = [
      ...(attempt?.layers ?? []).map(({ upload }) => upload),
      attempt?.vmState,
      attempt?.manifest,
    ];
    const keys = uploads.flatMap((upload) => upload?.artifact.key ?? []);
    await this.#deps.catalog.giveUpUploads(keys);
  }

  /** P6. Where the catalog or node.db cannot do it, the next try finds the layer missing again. */
  async #findForgotten(captureId: CaptureId): Promise<void> {
    const { catalog, nodeDb } = this.#deps;
    const chain = nodeDb.chainOf(this.#headOf(captureId));
    const uuids = (chain?.layers ?? []).map(({ uuid }) => uuid);
    const known = await catalog.findLayers(uuids);
    if (!known.ok) return;
    const there = new Set(known.value.map(({ uuid }) => uuid));
    orThrow(nodeDb.markUnpublished(uuids.filter((uuid) => !there.has(uuid))));
  }

  #headOf(captureId: CaptureId): LayerUuid {
    const layer = this.#deps.nodeDb.getJob(captureId)?.layer;
    if (layer == null) throw new Error(`capture ${captureId} has no layer to publish`);
    return layer.uuid;
  }

  async #publish(captureId: CaptureId, plan: PublishPlan, signal: AbortSignal): Promise<Snapshot> {
    const { catalog, nodeId } = this.#deps;
    const attempt = await this.#attempt(captureId);
    await this.#upload(plan, attempt, signal);
    const layers = attempt.layers.map(({ layer, upload }) => newLayer(layer, upload));
    const vmState = attempt.vmState?.artifact ?? null;
    attempt.manifest ??= await this.#manifest(captureId, plan, layers, vmState);
    await this.#store(attempt.manifest, signal);
    const request: PublishRequest = {
      snapshotId: plan.snapshotId,
      contentId: plan.contentId,
      sourceVm: plan.vm,
      nodeId,
      createdAtMs: plan.createdAtMs,
      manifest: attempt.manifest.artifact,
      layers,
      heads: [{ role: 'memory', layer: this.#headOf(captureId) }],
      artifacts: vmState === null ? [] : [{ name: 'vm-state', artifact: vmState }],
      ...this.#holdOf(plan),
      ...(plan.alias === null ? {} : { alias: plan.alias }),
    };
    crashPoint('artifacts-stored');
    const published = await catalog.publish(request);
    if (published.ok) return published.value.snapshot;
    if (!isAboutAlias(published.error)) throw new Failure(published.error);
    // The epoch is committed: a name that somebody else took meanwhile must not keep it from being
    // published. Whoever looks at the capture is told.
    return orThrow(await catalog.publish({ ...request, alias: undefined })).snapshot;
  }

  /** P7 */
  #holdOf({ hold }: PublishPlan): Pick<PublishRequest, 'hold'> {
    if (hold === null || !this.#deps.nodeDb.isHoldOwned(hold)) return {};
    return { hold: { holdId: hold, purpose: 'prepared' } };
  }

  /** What the tries before have named and stored, if it is still what is to be published (P2). */
  async #attempt(captureId: CaptureId): Promise<Attempt> {
    const unpublished = this.#deps.nodeDb.layersToPublish(captureId);
    const before = this.#attempts.get(captureId);
    if (before !== undefined) {
      const named = before.layers.map(({ layer }) => layer.uuid);
      if (named.join() === unpublished.map(({ uuid }) => uuid).join()) return before;
      await this.#giveUp(captureId);
    }
    const attempt: Attempt = {
      layers: await this.#nameLayers(unpublished),
      vmState: undefined,
      manifest: undefined,
    };
    this.#attempts.set(captureId, attempt);
    return attempt;
  }

  async #upload(plan: PublishPlan, attempt: Attempt, signal: AbortSignal): Promise<void> {
    if (attempt.vmState === undefined) {
      attempt.vmState =
        plan.vmStatePath === null ? null : await this.#nameFile('vm-state', plan.vmStatePath);
    }
    for (const { upload } of attempt.layers) await this.#store(upload, signal);
    if (attempt.vmState !== null) await this.#store(attempt.vmState, signal);
  }

  async #nameLayers(layers: readonly LocalLayer[]): Promise<Attempt['layers']> {
    if (layers.length === 0) return [];
    const facts = layers.map((layer): NewUpload => ({
      kind: 'layer',
      digest: layer.digest,
      sizeBytes: layer.sizeBytes,
    }));
    const named = await this.#record(facts);
    return layers.map((layer, index) => {
      const artifact = named[index];
      if (artifact === undefined) throw new Error('fewer uploads than layers');
      return { layer, upload: { artifact, sourcePath: layer.path, stored: false } };
    });
  }

  async #nameFile(kind: 'vm-state' | 'manifest', sourcePath: string): Promise<Upload> {
    const [artifact] = await this.#record([{ kind, ...(await fileFacts(sourcePath)) }]);
    if (artifact === undefined) throw new Error('no upload was named');
    return { artifact, sourcePath, stored: false };
  }

  async #record(artifacts: readonly NewUpload[]): Promise<readonly StoredArtifact[]> {
    const { catalog, nodeId } = this.#deps;
    return orThrow(await catalog.recordUpload({ nodeId, artifacts }));
  }

  async #store(upload: Upload, signal: AbortSignal): Promise<void> {
    if (upload.stored) return;
    const { artifact, sourcePath } = upload;
    orThrow(await this.#deps.store.put({ artifact, sourcePath, signal }));
    upload.stored = true;
  }

  async #manifest(
    captureId: CaptureId,
    plan: PublishPlan,
    layers: readonly NewLayer[],
    vmState: StoredArtifact | null,
  ): Promise<Upload> {
    const { catalog, nodeId, host, virtualization } = this.#deps;
    const first = layers[0];
    const published = first === undefined ? this.#headOf(captureId) : first.predecessor;
    const below = published === null ? [] : orThrow(await catalog.lineage(published));
    const chain = [...below, ...layers];
    const manifest = encodeManifest(
      manifestOf({ plan, captureId, nodeId, host, virtualization, chain, vmState }),
    );
    // Each try its own file: the store may have taken the last one's, as a link that nobody may write.
    const path = join(plan.stagingFolder, `manifest.${randomUUID()}.json`);
    await writeFile(path, manifest, { flag: 'wx' });
    const [artifact] = await this.#record([{ kind: 'manifest', ...bytesFacts(manifest) }]);
    if (artifact === undefined) throw new Error('no upload was named');
    return { artifact, sourcePath: path, stored: false };
  }
}

/** A name that the catalog refuses for good, whatever for. */
const isAboutAlias = (error: { readonly kind: string; readonly subject?: string }): boolean =>
  error.kind === 'alias-taken' || (error.kind === 'request-invalid' && error.subject === 'alias');

function aliasProblem(plan: PublishPlan, snapshot: Snapshot): FailureDetail | null {
  const { alias } = plan;
  if (alias === null || snapshot.aliases.includes(alias)) return null;
  if (!isName(alias)) return { kind: 'request-invalid', message: `alias: must be ${NAME_RULE}` };
  return { kind: 'alias-taken', message: `alias ${alias} was taken before this was published` };
}

function newLayer(layer: LocalLayer, upload: Upload): NewLayer {
  return {
    uuid: layer.uuid,
    predecessor: layer.parentUuid,
    virtualBytes: bytes(layer.virtualBytes),
    artifact: upload.artifact,
    complete: layer.complete,
  };
}

function publishFailureOf(error: unknown): PublishFailure {
  const { kind, message } = failureOf(error);
  const advice = hopeless[kind] ?? remedies[kind];
  return {
    kind,
    message: advice === undefined ? message : `${message} (${advice})`,
    retryable: hopeless[kind] === undefined,
  };
}
