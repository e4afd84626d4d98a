/**
 * Publishes committed captures: bytes to the artifact store, then one catalog transaction.
 *
 * P1: an upload intent is recorded before any byte is stored; the publish transaction removes it.
 * P2: trying again in this process stores nothing twice: keys and stored objects are remembered per
 *     capture.
 * P3: trying again after a crash first looks whether the snapshot is there: the answer may have
 *     been lost, not the work.
 * P4: captures of one VM publish one after the other, so that a layer never goes before its
 *     predecessor.
 */
import { rm, writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import { encodeManifest } from '../artifact/manifest.ts';
import { artifactRetryable, type ArtifactStore, type StoredArtifact } from '../artifact/store.ts';
import type { Catalog, Layer, NewLayer, NewUpload, PublishRequest } from '../catalog/catalog.ts';
import { catalogRetryable } from '../catalog/errors.ts';
import type { Clock } from '../clock.ts';
import type { Config } from '../config/schema.ts';
import type { CaptureJob } from '../lineage/jobs.queries.ts';
import type { NodeDb } from '../lineage/node-db.ts';
import type { LocalLayer } from '../lineage/layers.queries.ts';
import { Failure, err, ok, type FailureDetail, type Result } from '../result.ts';
import type { PublishFailure } from '../stages/publish.ts';
import { bytes, type CaptureId, type NodeId, type SnapshotId } from '../units.ts';
import { fileFacts, bytesFacts } from './file-facts.ts';
import { failureOf, orThrow } from './failure.ts';
import type { HostFacts } from './host-facts.ts';
import { manifestOf } from './manifest-of.ts';
import type { CaptureObserver } from './observer.ts';
import { parsePublishPlan, type PublishPlan } from './publish-plan.ts';

export interface PublisherDeps {
  readonly catalog: Catalog;
  readonly store: ArtifactStore;
  readonly nodeDb: NodeDb;
  readonly nodeId: NodeId;
  readonly host: HostFacts;
}

/** An object that a try has named, and whether its bytes are in the store. */
interface Upload {
  readonly artifact: StoredArtifact;
  readonly sourcePath: string;
  stored: boolean;
}

interface Attempt {
  layers: { readonly layer: LocalLayer; readonly upload: Upload }[] | undefined;
  vmState: Upload | null | undefined;
  manifest: Upload | undefined;
}

/**
 * Refusals that another try answers differently: its intents are recorded anew, its predecessor may
 * be there.
 */
const laterRetryable = new Set(['layer-missing', 'upload-missing', 'layer-conflict']);

export class Publisher {
  readonly #deps: PublisherDeps;
  readonly #attempts = new Map<CaptureId, Attempt>();
  readonly #turns = new Map<string, Promise<unknown>>();

  constructor(deps: PublisherDeps) {
    this.#deps = deps;
  }

  /** One try. Idempotent by the plan's ids. */
  publishOnce(
    captureId: CaptureId,
    plan: PublishPlan,
    signal: AbortSignal,
  ): Promise<Result<SnapshotId, PublishFailure>> {
    const before = this.#turns.get(plan.vm) ?? Promise.resolve();
    const turn = before.then(() => this.#try(captureId, plan, signal));
    this.#turns.set(plan.vm, turn);
    void turn.finally(() => {
      if (this.#turns.get(plan.vm) === turn) this.#turns.delete(plan.vm);
    });
    return turn;
  }

  /**
   * For captures that an earlier life of the daemon committed. Ends when it is done or `signal`
   * aborts.
   */
  async publishUntilDone(
    job: CaptureJob,
    deps: { readonly clock: Clock; readonly config: Config; readonly observer: CaptureObserver },
    signal: AbortSignal,
  ): Promise<void> {
    if (job.publishJson === null) throw new Error(`capture ${job.captureId} has no publish plan`);
    const plan = parsePublishPlan(job.publishJson);
    const { retryMin, retryMax } = deps.config.pipeline.publish;
    for (let waitMs: number = retryMin; !signal.aborted; waitMs = Math.min(waitMs * 2, retryMax)) {
      const published = await this.publishOnce(job.captureId, plan, signal).catch(() => null);
      if (published === null || published.ok) return;
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
  ): Promise<Result<SnapshotId, PublishFailure>> {
    try {
      signal.throwIfAborted();
      const known = await this.#deps.catalog.show(plan.snapshotId);
      if (!known.ok && known.error.kind !== 'snapshot-missing') throw new Failure(known.error);
      if (!known.ok) await this.#publish(captureId, plan, signal);
      orThrow(this.#deps.nodeDb.published(captureId, plan.snapshotId));
      this.#attempts.delete(captureId);
      await rm(plan.stagingFolder, { recursive: true, force: true });
      return ok(plan.snapshotId);
    } catch (error) {
      if (signal.aborted) throw error;
      const detail = failureOf(error);
      if (laterRetryable.has(detail.kind)) this.#attempts.delete(captureId);
      return err({ ...detail, retryable: isRetryable(detail) });
    }
  }

  async #publish(captureId: CaptureId, plan: PublishPlan, signal: AbortSignal): Promise<void> {
    const { catalog, nodeId } = this.#deps;
    const attempt = this.#attempts.get(captureId) ?? emptyAttempt();
    this.#attempts.set(captureId, attempt);
    await this.#upload(captureId, plan, attempt, signal);
    const layers = (attempt.layers ?? []).map(({ layer, upload }) => newLayer(layer, upload));
    const vmState = attempt.vmState?.artifact ?? null;
    attempt.manifest ??= await this.#manifest(captureId, plan, layers, vmState);
    await this.#store(attempt.manifest, signal);
    const head = layers.at(-1);
    if (head === undefined) throw new Error(`capture ${captureId} has no layer to publish`);
    const request: PublishRequest = {
      snapshotId: plan.snapshotId,
      contentId: plan.contentId,
      sourceVm: plan.vm,
      nodeId,
      createdAtMs: plan.createdAtMs,
      manifest: attempt.manifest.artifact,
      layers,
      heads: [{ role: 'memory', layer: head.uuid }],
      artifacts: vmState === null ? [] : [{ name: 'vm-state', artifact: vmState }],
      ...(plan.alias === null ? {} : { alias: plan.alias }),
    };
    const published = await catalog.publish(request);
    if (published.ok) return;
    if (published.error.kind !== 'alias-taken') throw new Failure(published.error);
    // The epoch is committed: a name that somebody else took meanwhile must not keep it from being
    // published.
    orThrow(await catalog.publish({ ...request, alias: undefined }));
  }

  async #upload(
    captureId: CaptureId,
    plan: PublishPlan,
    attempt: Attempt,
    signal: AbortSignal,
  ): Promise<void> {
    const { nodeDb } = this.#deps;
    attempt.layers ??= await this.#nameLayers(nodeDb.layersToPublish(captureId));
    if (attempt.vmState === undefined) {
      attempt.vmState =
        plan.vmStatePath === null ? null : await this.#nameFile('vm-state', plan.vmStatePath);
    }
    for (const { upload } of attempt.layers) await this.#store(upload, signal);
    if (attempt.vmState !== null) await this.#store(attempt.vmState, signal);
  }

  async #nameLayers(
    layers: readonly LocalLayer[],
  ): Promise<{ readonly layer: LocalLayer; readonly upload: Upload }[]> {
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
    const { catalog, nodeId, host } = this.#deps;
    const first = layers[0]?.predecessor ?? null;
    const below: readonly Layer[] = first === null ? [] : orThrow(await catalog.lineage(first));
    const chain = [...below, ...layers];
    const manifest = encodeManifest(manifestOf({ plan, captureId, nodeId, host, chain, vmState }));
    const path = join(plan.stagingFolder, 'manifest.json');
    await writeFile(path, manifest);
    const [artifact] = await this.#record([{ kind: 'manifest', ...bytesFacts(manifest) }]);
    if (artifact === undefined) throw new Error('no upload was named');
    return { artifact, sourcePath: path, stored: false };
  }
}

const emptyAttempt = (): Attempt => ({
  layers: undefined,
  vmState: undefined,
  manifest: undefined,
});

function newLayer(layer: LocalLayer, upload: Upload): NewLayer {
  return {
    uuid: layer.uuid,
    predecessor: layer.parentUuid,
    virtualBytes: bytes(layer.virtualBytes),
    artifact: upload.artifact,
  };
}

function isRetryable(detail: FailureDetail): boolean {
  const tables: Readonly<Record<string, boolean>> = { ...catalogRetryable, ...artifactRetryable };
  if (laterRetryable.has(detail.kind)) return true;
  return tables[detail.kind] ?? detail.kind.startsWith('state-');
}
