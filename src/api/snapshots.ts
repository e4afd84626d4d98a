/** `/v1/snapshots` and `/v1/aliases`: what was published, what it needs, and its retirement. */
import { createRoute, z } from '@hono/zod-openapi';
import type { Captures } from '../capture/types.ts';
import type { Catalog } from '../catalog/catalog.ts';
import { snapshotId } from '../units.ts';
import { needs } from './auth.ts';
import { problemResponses, valueOf } from './problem.ts';
import { newRouter } from './router.ts';
import {
  aliasSchema,
  contentSchema,
  jsonAnswer,
  jsonBody,
  chainLayerSchema,
  referenceSchema,
  snapshotSchema,
} from './schemas.ts';

const params = z.object({ snapshot: referenceSchema });
const tags = ['snapshots'];
const wholeNumber = z.coerce.number().int().min(0).max(Number.MAX_SAFE_INTEGER);

const list = createRoute({
  method: 'get',
  path: '/v1/snapshots',
  tags,
  summary: 'Snapshots, newest first, a page at a time.',
  middleware: needs('read'),
  request: {
    query: z.strictObject({
      cursor: z.string().max(1024).optional(),
      limit: wholeNumber.min(1).max(1000).optional(),
      sourceVm: z.string().max(256).optional(),
      alias: z.string().max(256).optional(),
      state: z.enum(['active', 'retired']).optional(),
      createdFromMs: wholeNumber.optional(),
      createdBeforeMs: wholeNumber.optional(),
    }),
  },
  responses: {
    200: jsonAnswer(
      z.object({
        snapshots: z.array(snapshotSchema).readonly(),
        nextCursor: z.string().nullable(),
      }),
      'One page.',
    ),
    ...problemResponses,
  },
});

const shown = z.object({ snapshot: snapshotSchema, content: contentSchema.nullable() });

const show = createRoute({
  method: 'get',
  path: '/v1/snapshots/{snapshot}',
  tags,
  summary: 'One snapshot by id or alias, whatever its state, and the content it points at.',
  middleware: needs('read'),
  request: { params },
  responses: { 200: jsonAnswer(shown, 'The snapshot.'), ...problemResponses },
});

const lineage = createRoute({
  method: 'get',
  path: '/v1/snapshots/{snapshot}/lineage',
  tags,
  summary: 'The chain of layers of one role, bottom to top.',
  middleware: needs('read'),
  request: { params, query: z.strictObject({ role: referenceSchema.default('memory') }) },
  responses: {
    200: jsonAnswer(z.object({ layers: z.array(chainLayerSchema).readonly() }), 'The chain.'),
    ...problemResponses,
  },
});

const retire = createRoute({
  method: 'delete',
  path: '/v1/snapshots/{snapshot}',
  tags,
  summary: 'Hide a snapshot from new users. Those that hold it go on.',
  middleware: needs('admin'),
  request: { params },
  responses: { 200: jsonAnswer(snapshotSchema, 'Retired.'), ...problemResponses },
});

const invalidate = createRoute({
  method: 'post',
  path: '/v1/snapshots/{snapshot}/invalidate',
  tags,
  summary: 'Mark a snapshot unfit, so that it is refused with the reason; null takes that back.',
  middleware: needs('admin'),
  request: {
    params,
    body: jsonBody(z.strictObject({ reason: z.string().min(1).max(1024).nullable() })),
  },
  responses: { 200: jsonAnswer(snapshotSchema, 'Marked.'), ...problemResponses },
});

const suspect = createRoute({
  method: 'post',
  path: '/v1/snapshots/{snapshot}/suspect',
  tags,
  summary:
    'Mark a snapshot suspect, so that restores and holds need `allowSuspect`; null takes that back.',
  middleware: needs('admin'),
  request: {
    params,
    body: jsonBody(z.strictObject({ reason: z.string().min(1).max(1024).nullable() })),
  },
  responses: { 200: jsonAnswer(snapshotSchema, 'Marked.'), ...problemResponses },
});

const addAlias = createRoute({
  method: 'post',
  path: '/v1/aliases',
  tags,
  summary: 'Name a snapshot, for good.',
  middleware: needs('capture'),
  request: {
    body: jsonBody(z.strictObject({ alias: aliasSchema, snapshotId: referenceSchema })),
  },
  responses: { 201: jsonAnswer(snapshotSchema, 'Named.'), ...problemResponses },
});

const showAlias = createRoute({
  method: 'get',
  path: '/v1/aliases/{snapshot}',
  tags,
  summary: 'The usable snapshot behind an alias.',
  middleware: needs('read'),
  request: { params },
  responses: { 200: jsonAnswer(shown, 'The snapshot.'), ...problemResponses },
});

interface SnapshotDeps {
  readonly catalog: Catalog;
  readonly captures: Pick<Captures, 'epochsOf'>;
}

export function snapshotRoutes({ catalog, captures }: SnapshotDeps) {
  return newRouter()
    .openapi(list, async (c) => c.json(valueOf(await catalog.list(c.req.valid('query'))), 200))
    .openapi(show, async (c) => {
      const snapshot = valueOf(await catalog.show(c.req.valid('param').snapshot));
      const found = await catalog.findContent(snapshot.contentId);
      const isGone = !found.ok && found.error.kind === 'content-missing';
      return c.json({ snapshot, content: isGone ? null : valueOf(found) }, 200);
    })
    .openapi(lineage, async (c) => {
      const { role } = c.req.valid('query');
      const snapshot = valueOf(await catalog.show(c.req.valid('param').snapshot));
      const content = valueOf(await catalog.findContent(snapshot.contentId));
      const head = content.heads.find((candidate) => candidate.role === role);
      const chain = head === undefined ? [] : valueOf(await catalog.lineage(head.layer));
      const epochs = captures.epochsOf(chain.map(({ uuid }) => uuid));
      const layers = chain.map((layer) => ({ ...layer, epoch: epochs.get(layer.uuid) ?? null }));
      return c.json({ layers }, 200);
    })
    .openapi(retire, async (c) =>
      c.json(valueOf(await catalog.retire(c.req.valid('param').snapshot)), 200),
    )
    .openapi(invalidate, async (c) => {
      const { reason } = c.req.valid('json');
      return c.json(valueOf(await catalog.setInvalid(c.req.valid('param').snapshot, reason)), 200);
    })
    .openapi(suspect, async (c) => {
      const { reason } = c.req.valid('json');
      return c.json(valueOf(await catalog.setSuspect(c.req.valid('param').snapshot, reason)), 200);
    })
    .openapi(addAlias, async (c) => {
      const { alias, snapshotId: id } = c.req.valid('json');
      valueOf(await catalog.addAlias(alias, snapshotId(id)));
      c.header('Location', `/v1/aliases/${encodeURIComponent(alias)}`);
      return c.json(valueOf(await catalog.show(id)), 201);
    })
    .openapi(showAlias, async (c) =>
      c.json(valueOf(await catalog.resolve(c.req.valid('param').snapshot)), 200),
    );
}
