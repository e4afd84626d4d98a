/** The parts of a daemon, opened in order and closed in reverse; the demo runs on the same ones. */
import { accessSync, constants, mkdirSync } from 'node:fs';
import { join } from 'node:path';
import { FileArtifactStore } from '../artifact/file-store.ts';
import type { ArtifactError } from '../artifact/store.ts';
import { Engine } from '../capture/engine.ts';
import { CaptureService } from '../capture/service.ts';
import type { Transactions } from '../catalog/database.ts';
import { catalogRetryable } from '../catalog/errors.ts';
import type { OpenCatalog } from '../catalog/open.ts';
import { ReleaseFlusher } from '../catalog/release-queue.ts';
import { SuspectFlusher } from '../catalog/suspect-queue.ts';
import { reopeningCatalog, type FirstTry } from '../catalog/reopening.ts';
import type { ReopeningCatalog } from '../catalog/reopening.ts';
import { systemClock } from '../clock.ts';
import { catalogUrl, type Config } from '../config/load.ts';
import { GcService } from '../gc/service.ts';
import { NodeDb } from '../lineage/node-db.ts';
import type { Logger } from '../observability/log.ts';
import { createTelemetry, type Telemetry } from '../observability/telemetry.ts';
import { Cleanups } from '../pipeline/cleanups.ts';
import { Failure, systemCode, type FailureDetail, type Result } from '../result.ts';
import { nodeId } from '../units.ts';
import { catalogCounts, countHolds } from './catalog-metrics.ts';
import { createObserver, walBytes } from './daemon-observer.ts';
import type { Supervise } from './supervise.ts';
import { VERSION } from './version.ts';

export interface Parts extends AsyncDisposable {
  readonly config: Config;
  /** Opened in the background: its calls fail while it is away. */
  readonly catalog: ReopeningCatalog['catalog'];
  /** How the first try to open the catalog ended. */
  readonly catalogTried: FirstTry;
  readonly store: FileArtifactStore;
  readonly nodeDb: NodeDb;
  readonly service: CaptureService;
  readonly gc: GcService;
  readonly telemetry: Telemetry;
  readonly logger: Logger;
}

export function valueOf<T, E extends FailureDetail>(result: Result<T, E>): T {
  if (result.ok) return result.value;
  throw new Failure(result.error);
}

/** How a catalog is opened from the configuration. */
export function catalogOptions({ catalog }: Pick<Config, 'catalog'>) {
  return {
    url: catalogUrl(catalog),
    migrations: catalog.migrations,
    poolMax: catalog.poolMax,
    connectTimeoutMs: catalog.connectTimeout,
    statementTimeoutMs: catalog.statementTimeout,
    lockTimeoutMs: catalog.lockTimeout,
  };
}

/** Makes the folders, or says which key names one that cannot be used. */
export function makeFolders(config: Config): void {
  const { state, layers, artifacts, staging } = config.paths;
  for (const [key, path] of Object.entries({ state, layers, artifacts, staging })) {
    try {
      mkdirSync(path, { recursive: true, mode: 0o750 });
      accessSync(path, constants.W_OK);
    } catch (error) {
      const why = systemCode(error) ?? String(error);
      const message = `paths.${key}: ${path} cannot be made or written: ${why}`;
      throw new Failure({ kind: 'folder-unusable', message });
    }
  }
}

const queueMaxima = (config: Config) => {
  const { pipeline } = config;
  const bounds = new Map<string, number>([
    ['pause', pipeline.pause.queueMax],
    ['dirty-bitmap', pipeline.dirtyBitmap.queueMax],
    ['coalesce', pipeline.coalesce.queueMax],
    ['read', pipeline.read.queueMax],
    ['compact', pipeline.compact.queueMax],
    ['commit', pipeline.commit.queueMax],
    ['publish', pipeline.publish.queueMax],
    ['resume', pipeline.resume.queueMax],
  ]);
  return (name: string) => bounds.get(name);
};

export interface OpenOptions {
  readonly config: Config;
  readonly logger: Logger;
  readonly supervise: Supervise;
}

/** Throws `Failure` naming what cannot be opened; what was open is closed again. */
export async function openParts(options: OpenOptions): Promise<Parts> {
  const cleanups = new Cleanups();
  try {
    const parts = await open(options, cleanups);
    return { ...parts, [Symbol.asyncDispose]: () => cleanups[Symbol.asyncDispose]() };
  } catch (error) {
    await cleanups[Symbol.asyncDispose]();
    throw error;
  }
}

/** The artifact store of this node. */
export const openStore = (config: Config): Promise<Result<FileArtifactStore, ArtifactError>> =>
  FileArtifactStore.open({ root: config.paths.artifacts, node: nodeId(config.node.id) });

async function open(options: OpenOptions, cleanups: Cleanups) {
  const { config, logger, supervise } = options;
  const { observability } = config;
  makeFolders(config);
  const telemetry = createTelemetry({
    nodeId: config.node.id,
    version: VERSION,
    otlpEndpoint: observability.otlpEndpoint,
    otlpIntervalMs: observability.otlpInterval,
    traceShare: observability.traceShare,
  });
  cleanups.defer(() => telemetry.close());
  const nodeDbPath = join(config.paths.state, 'node.db');
  const nodeDb = valueOf(NodeDb.open(nodeDbPath, systemClock));
  cleanups.defer(() => nodeDb.close());
  const id = nodeId(config.node.id);
  const opening = openCatalogOf(config, logger);
  const catalog = countHolds(opening.catalog, telemetry.metrics);
  cleanups.defer(() => catalog.close());
  const store = valueOf(await openStore(config));
  const observer = createObserver({
    metrics: telemetry.metrics,
    tracer: telemetry.tracer,
    logger,
    queueMax: queueMaxima(config),
    slabBudget: config.pipeline.slabBudget,
  });
  const engine = new Engine(config, observer);
  cleanups.useAsync(engine);
  const deps = { config, clock: systemClock, nodeDb, catalog, store, engine, observer };
  // After node.db, whose lock says at once that another daemon runs here.
  const supervisor = await supervise(cleanups);
  const releases = new ReleaseFlusher({
    catalog,
    store: nodeDb,
    clock: systemClock,
    onError: (error) => logger.warn({ error }, 'releasing holds failed; they stay queued'),
  });
  cleanups.useAsync(releases);
  const suspects = new SuspectFlusher({
    catalog,
    store: nodeDb,
    clock: systemClock,
    onError: (error) => logger.warn({ error }, 'marking suspect layers failed; they stay queued'),
  });
  cleanups.useAsync(suspects);
  const gc = openCollector(config, catalog, store, telemetry, logger);
  cleanups.useAsync(gc);
  // Closed before those two, which wait for what they have asked of the catalog: it resumes VMs.
  const service = await CaptureService.start({ ...deps, supervisor, nodeId: id });
  cleanups.defer(() => service.close());
  cleanups.defer(observeParts(telemetry, { service, nodeDb, nodeDbPath, config, catalog }));
  releases.start();
  suspects.start();
  const catalogTried = opening.firstTry;
  return { config, catalog, catalogTried, store, nodeDb, service, gc, telemetry, logger };
}

/** Begins to open the catalog. Nothing below waits for it: recovery is due when it is away too. */
function openCatalogOf(config: Config, logger: Logger): ReopeningCatalog {
  return reopeningCatalog(catalogOptions(config), {
    nodeId: nodeId(config.node.id),
    onOpen: () => logger.info('the catalog is open'),
    onAway: (error) => {
      const level = catalogRetryable[error.kind] ? 'warn' : 'error';
      logger[level]({ error }, 'the catalog cannot be used; it is tried again');
    },
    onForgotten: (error) => logger.error({ error }, 'the catalog refuses this node'),
  });
}

function openCollector(
  config: Config,
  { database }: OpenCatalog<Transactions>,
  store: FileArtifactStore,
  { metrics }: Telemetry,
  logger: Logger,
): GcService {
  return new GcService({
    database,
    store,
    settings: config.gc,
    name: config.node.id,
    onRun: (result) => {
      if (!result.ok) {
        const { error } = result;
        const isStopped = error.kind === 'mass-delete' || error.kind === 'cancelled';
        const none = { seconds: 0, condemned: 0, reclaimed: 0, reclaimedBytes: 0, trimmed: 0 };
        metrics.gcRun({ outcome: isStopped ? 'stopped' : 'failed', ...none });
        logger.warn({ error }, 'a collection did not finish');
        return;
      }
      const { value } = result;
      metrics.gcRun({
        outcome: 'done',
        seconds: value.durationMs / 1000,
        condemned: value.layersCondemned,
        reclaimed: value.objectsReclaimed,
        reclaimedBytes: value.bytesReclaimed,
        trimmed: value.holdsTrimmed + value.snapshotsTrimmed,
      });
      logger.info({ report: value }, 'collected');
    },
  });
}

function observeParts(
  telemetry: Telemetry,
  parts: Pick<Parts, 'service' | 'nodeDb' | 'config' | 'catalog'> & { readonly nodeDbPath: string },
): () => void {
  const { service, nodeDb, nodeDbPath, config, catalog } = parts;
  const { url } = config.catalog;
  const catalogPath = url.startsWith('sqlite:') ? url.slice('sqlite:'.length) : undefined;
  return telemetry.metrics.observe({
    vms: () => {
      const gone = service.listVms().filter((vm) => vm.state === 'gone').length;
      return { attached: service.listVms().length - gone, gone };
    },
    stuckPaused: () => service.stuckPaused,
    pendingReleases: () => nodeDb.countReleases(),
    pendingPublishes: () => nodeDb.countCommitted(),
    catalog: () => catalogCounts(catalog, nodeId(config.node.id)),
    walBytes: () => [
      { db: 'node', bytes: walBytes(nodeDbPath) },
      ...(catalogPath === undefined ? [] : [{ db: 'catalog', bytes: walBytes(catalogPath) }]),
    ],
  });
}
