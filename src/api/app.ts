/** The HTTP API: limits first, then the routes of each resource, then their description. */
import { randomUUID } from 'node:crypto';
import type { OpenAPIHono } from '@hono/zod-openapi';
import type { MiddlewareHandler } from 'hono';
import { matchedRoutes } from 'hono/route';
import type { Captures } from '../capture/types.ts';
import type { Catalog } from '../catalog/catalog.ts';
import type { Clock } from '../clock.ts';
import type { Config } from '../config/load.ts';
import type { Logger } from '../observability/log.ts';
import type { Metrics } from '../observability/metrics.ts';
import { nodeId } from '../units.ts';
import { authenticate, guardHost, guardOrigin } from './auth.ts';
import { captureRoutes } from './captures.ts';
import { gcRoutes, type GcControl } from './gc.ts';
import { holdRoutes, volumeRoutes } from './holds.ts';
import { idempotency } from './idempotency.ts';
import { refused } from './problem.ts';
import { limitBody, newRouter, onError, problemAnswer, type ApiEnv } from './router.ts';
import { snapshotRoutes } from './snapshots.ts';
import { describe, systemRoutes, type SystemDeps } from './system.ts';
import { vmRoutes } from './vms.ts';

export interface ApiDeps extends SystemDeps {
  readonly config: Pick<Config, 'server' | 'auth' | 'paths' | 'node'>;
  readonly captures: Captures;
  readonly catalog: Catalog;
  readonly gc: GcControl;
  readonly metrics: Pick<Metrics, 'httpRequest'>;
  readonly logger: Logger;
  readonly clock: Clock;
}

const knownMethods = new Set(['GET', 'HEAD', 'POST', 'PUT', 'PATCH', 'DELETE', 'OPTIONS']);

/** The pattern of the route that answered; one label for all that none did. */
function routeOf(routes: ReturnType<typeof matchedRoutes>): string {
  const patterns = routes.map((route) => route.path).filter((path) => !path.endsWith('*'));
  return patterns.at(-1) ?? 'none';
}

/** What may be asked of a path, in order; none where there is no such path. */
function methodsOf(
  routes: readonly { readonly method: string; readonly path: string }[],
  path: string,
): string[] {
  const parts = path.split('/');
  const fits = (pattern: string): boolean => {
    const wanted = pattern.split('/');
    return (
      wanted.length === parts.length &&
      wanted.every((part, i) => (part.startsWith(':') ? parts[i] !== '' : part === parts[i]))
    );
  };
  const own = routes.filter((route) => knownMethods.has(route.method) && fits(route.path));
  const methods = new Set(own.map((route) => route.method));
  if (methods.has('GET')) methods.add('HEAD');
  return [...methods].sort();
}

function observe(deps: ApiDeps): MiddlewareHandler<ApiEnv> {
  const { clock, logger, metrics } = deps;
  return async (c, next) => {
    const requestId = randomUUID();
    c.set('requestId', requestId);
    const startedNs = clock.monotonicNs();
    await next();
    const seconds = Number(clock.monotonicNs() - startedNs) / 1e9;
    const method = knownMethods.has(c.req.method) ? c.req.method : 'other';
    const route = routeOf(matchedRoutes(c));
    const { status } = c.res;
    metrics.httpRequest({ method, route, status, seconds });
    c.res.headers.set('X-Request-Id', requestId);
    const principal = (c.get('principal') as { name: string } | undefined)?.name;
    const line = { requestId, method, route, status, ms: Math.round(seconds * 1000), principal };
    if (method === 'GET') logger.debug(line, 'request');
    else logger.info(line, 'request');
  };
}

export function createApi(deps: ApiDeps): OpenAPIHono<ApiEnv> {
  const { captures, catalog, config } = deps;
  const { tokens } = config.auth;
  const app = newRouter();
  app.onError(onError(deps.logger));
  app.notFound((c) => {
    const { method, path } = c.req;
    const allowed = methodsOf(app.routes, path);
    if (allowed.length === 0) {
      return problemAnswer(c, refused('route-missing', `there is no ${method} ${path}`).detail);
    }
    c.header('Allow', allowed.join(', '));
    const message = `${method} is not possible on ${path}, only ${allowed.join(', ')}`;
    return problemAnswer(c, refused('method-not-allowed', message).detail);
  });
  app.use(observe(deps));
  app.use(guardHost(tokens));
  app.use(guardOrigin(tokens));
  app.use(authenticate(tokens));
  app.use(limitBody(config.server.bodyMax));
  app.use(idempotency(deps.clock));
  app.route('/', systemRoutes(deps));
  app.route('/', vmRoutes({ captures, socketRoots: config.paths.socketRoots }));
  app.route('/', captureRoutes({ captures }));
  app.route('/', snapshotRoutes({ catalog, captures }));
  app.route('/', holdRoutes({ catalog, nodeId: nodeId(config.node.id) }));
  app.route('/', volumeRoutes({ catalog }));
  app.route('/', gcRoutes({ gc: deps.gc }));
  describe(app, deps.version);
  return app;
}
