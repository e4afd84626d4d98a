/** `/v1/gc`: what a collection would delete, and one on demand. */
import { createRoute, z } from '@hono/zod-openapi';
import type { FailureDetail, Result } from '../result.ts';
import { needs } from './auth.ts';
import { problemResponses, valueOf } from './problem.ts';
import { newRouter } from './router.ts';
import { jsonAnswer, jsonBody } from './schemas.ts';

/** Counts and bytes of a plan or a run, and what it names; plain data. */
export type GcReport = Readonly<Record<string, unknown>>;

/** The collector, as the API drives it. */
export interface GcControl {
  plan(signal: AbortSignal): Promise<Result<GcReport, FailureDetail>>;
  /** A run that has begun goes on when its caller hangs up. */
  run(options: { readonly force: boolean }): Promise<Result<GcReport, FailureDetail>>;
}

const report = z.record(z.string(), z.unknown()).openapi('GcReport');

const plan = createRoute({
  method: 'get',
  path: '/v1/gc/plan',
  tags: ['gc'],
  summary: 'What a collection would condemn and reclaim now. Changes nothing.',
  middleware: needs('read'),
  responses: { 200: jsonAnswer(report, 'The plan.'), ...problemResponses },
});

const run = createRoute({
  method: 'post',
  path: '/v1/gc/runs',
  tags: ['gc'],
  summary: 'Collect now. `force` goes past the mass-delete guard.',
  middleware: needs('admin'),
  request: { body: jsonBody(z.strictObject({ force: z.boolean().default(false) })) },
  responses: { 200: jsonAnswer(report, 'What was done.'), ...problemResponses },
});

export function gcRoutes({ gc }: { readonly gc: GcControl }) {
  return newRouter()
    .openapi(plan, async (c) => c.json(valueOf(await gc.plan(c.req.raw.signal)), 200))
    .openapi(run, async (c) => c.json(valueOf(await gc.run(c.req.valid('json'))), 200));
}
