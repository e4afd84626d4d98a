/** `varve serve`: the daemon, until SIGTERM or SIGINT. */
import type { Command } from 'commander';
import { createApi } from '../api/app.ts';
import { listen } from '../api/server.ts';
import type { ReadyCheck } from '../api/system.ts';
import { catalogRetryable } from '../catalog/errors.ts';
import { systemClock } from '../clock.ts';
import type { Config } from '../config/load.ts';
import { createLogger, type Logger } from '../observability/log.ts';
import { Failure } from '../result.ts';
import { configFrom } from './context.ts';
import { makeFolders, openParts, valueOf, type Parts } from './parts.ts';
import { supervised } from './supervise.ts';
import { VERSION } from './version.ts';

const READY_TIMEOUT_MS = 1_000;
/** How long serving waits for the first try to open the catalog, milliseconds. */
const CATALOG_WAIT_MS = 1_000;

async function catalogCheck(parts: Parts): Promise<ReadyCheck> {
  const late = new Promise<ReadyCheck>((resolve) => {
    const answer = { name: 'catalog', ok: false, detail: `no answer in ${READY_TIMEOUT_MS} ms` };
    setTimeout(() => resolve(answer), READY_TIMEOUT_MS).unref();
  });
  const asked = parts.catalog.ping().then((pong) => ({
    name: 'catalog',
    ok: pong.ok,
    detail: pong.ok ? '' : pong.error.message,
  }));
  return Promise.race([asked, late]);
}

function folderCheck(config: Config): ReadyCheck {
  try {
    makeFolders(config);
    return { name: 'folders', ok: true, detail: '' };
  } catch (error) {
    return { name: 'folders', ok: false, detail: (error as Error).message };
  }
}

/** Resolves with the signal that ends the daemon. */
function stopSignal(): Promise<NodeJS.Signals> {
  return new Promise((resolve) => {
    for (const signal of ['SIGTERM', 'SIGINT'] as const) process.once(signal, resolve);
  });
}

/** Throws `Failure` where the first try to open the catalog finds what no waiting makes right. */
async function refuseUnfit({ catalogTried }: Parts): Promise<void> {
  const tried = await catalogTried;
  if (tried.ok) return;
  const { kind } = tried.error;
  if (kind === 'node-forgotten' || !catalogRetryable[kind]) throw new Failure(tried.error);
}

/** Runs the daemon and answers once it is stopped. Throws `Failure` where it cannot start. */
export async function serve(config: Config, logger: Logger): Promise<void> {
  const stopping = stopSignal();
  await using parts = await openParts({
    config,
    logger,
    supervise: supervised(config, logger),
  });
  const { telemetry } = parts;
  const fit = refuseUnfit(parts);
  await Promise.race([fit, systemClock.sleep(CATALOG_WAIT_MS, new AbortController().signal)]);
  const api = createApi({
    config,
    captures: parts.service,
    catalog: parts.catalog,
    gc: parts.gc,
    metrics: telemetry.metrics,
    logger,
    clock: systemClock,
    version: VERSION,
    renderMetrics: telemetry.render,
    readiness: async () => [await catalogCheck(parts), folderCheck(config)],
  });
  const { server, auth } = config;
  const hasTokens = auth.tokens.length > 0;
  const listening = valueOf(await listen({ server, hasTokens, fetch: api.fetch }));
  logger.info({ addresses: listening.addresses, version: VERSION }, 'serving');
  try {
    const signal = await Promise.race([stopping, fit.then(() => stopping)]);
    logger.info({ signal }, 'stopping');
  } finally {
    // A second signal ends the process at once, as if there were no handler.
    const closed = listening.close(server.shutdownGrace);
    await drain(parts, server.shutdownGrace);
    await closed;
  }
}

/** Lets running captures end by themselves, for a while; the service aborts the others. */
async function drain(parts: Parts, graceMs: number): Promise<void> {
  const patience = AbortSignal.timeout(graceMs);
  const running = parts.service.listCaptures().filter((capture) => capture.endedAtMs === null);
  const waits = running.map((capture) => parts.service.waitFor(capture.captureId, patience));
  await Promise.allSettled(waits);
}

export function addServe(program: Command): void {
  program
    .command('serve')
    .description('run the daemon')
    .action(async (_options, command: Command) => {
      const config = configFrom(command);
      const logger = createLogger({
        level: config.observability.logLevel,
        nodeId: config.node.id,
      });
      await serve(config, logger);
    });
}
