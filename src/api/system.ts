/** Health, metrics and the API's own description. Nothing here loads anything from elsewhere. */
import { createRoute, z } from '@hono/zod-openapi';
import type { OpenAPIHono } from '@hono/zod-openapi';
import { PROMETHEUS_CONTENT_TYPE } from '../observability/prometheus.ts';
import { needs } from './auth.ts';
import { docsPage, problemsPage } from './docs-page.ts';
import { newRouter, type ApiEnv } from './router.ts';
import { jsonAnswer } from './schemas.ts';

export interface ReadyCheck {
  readonly name: string;
  readonly ok: boolean;
  /** What is wrong; empty where nothing is. */
  readonly detail: string;
}

export interface SystemDeps {
  readonly version: string;
  /** Prometheus text of everything as of now. */
  readonly renderMetrics: () => Promise<string>;
  /** Whether what a new capture needs is there. Answers within a second or so. */
  readonly readiness: () => Promise<readonly ReadyCheck[]>;
}

const tags = ['system'];

const healthz = createRoute({
  method: 'get',
  path: '/healthz',
  tags,
  summary: 'The process lives. Touches no disk and no database.',
  responses: {
    200: jsonAnswer(z.object({ status: z.literal('ok'), version: z.string() }), 'Alive.'),
  },
});

const readySchema = z.object({
  status: z.enum(['ready', 'degraded']),
  checks: z.array(z.object({ name: z.string(), ok: z.boolean(), detail: z.string() })).readonly(),
});

const readyz = createRoute({
  method: 'get',
  path: '/readyz',
  tags,
  summary: 'Whether everything a capture needs is there. Running captures go on even when not.',
  responses: {
    200: jsonAnswer(readySchema, 'Ready.'),
    503: jsonAnswer(readySchema, 'Something is missing; `checks` says what.'),
  },
});

export function systemRoutes(deps: SystemDeps) {
  const router = newRouter()
    .openapi(healthz, (c) => c.json({ status: 'ok' as const, version: deps.version }, 200))
    .openapi(readyz, async (c) => {
      const checks = await deps.readiness();
      return checks.every((check) => check.ok)
        ? c.json({ status: 'ready' as const, checks }, 200)
        : c.json({ status: 'degraded' as const, checks }, 503);
    });
  router.get('/metrics', needs('read'), async (c) =>
    c.body(await deps.renderMetrics(), 200, { 'Content-Type': PROMETHEUS_CONTENT_TYPE }),
  );
  return router;
}

/** `/openapi.json` and the pages made from it; mounted last, when all routes are known. */
export function describe(app: OpenAPIHono<ApiEnv>, version: string): void {
  const document = app.getOpenAPI31Document({
    openapi: '3.1.0',
    info: {
      title: 'Varve',
      version,
      description: 'Captures of running microVMs as thin layers. Errors are RFC 9457 problems.',
    },
    security: [{ bearer: [] }],
  });
  const described = {
    ...document,
    components: {
      ...document.components,
      securitySchemes: { bearer: { type: 'http', scheme: 'bearer' } },
    },
  };
  const page = docsPage(described);
  const problems = problemsPage();
  // No script, no style and no image from anywhere but the page itself.
  const html = {
    'Content-Type': 'text/html; charset=utf-8',
    'Content-Security-Policy': "default-src 'none'; style-src 'unsafe-inline'",
  };
  app.get('/openapi.json', (c) => c.json(described));
  app.get('/docs', async (c) => c.body(await page, 200, html));
  app.get('/docs/problems', async (c) => c.body(await problems, 200, html));
}
