/** `/v1/holds` and `/v1/volumes`: durable claims on contents, and named contents that move on. */
import { createHash, randomUUID } from 'node:crypto';
import { createRoute, z } from '@hono/zod-openapi';
import type { Catalog } from '../catalog/catalog.ts';
import { contentId, holdId, type HoldId, type NodeId } from '../units.ts';
import { needs } from './auth.ts';
import { problemResponses, valueOf } from './problem.ts';
import { newRouter } from './router.ts';
import {
  aliasSchema,
  holdSchema,
  jsonAnswer,
  jsonBody,
  nameSchema,
  referenceSchema,
  volumeSchema,
} from './schemas.ts';

const wholeNumber = z.coerce.number().int().min(1).max(1000);

const takeHold = createRoute({
  method: 'post',
  path: '/v1/holds',
  tags: ['holds'],
  summary: 'Hold a snapshot or content, so that its bytes stay until the hold is released.',
  middleware: needs('capture'),
  request: {
    body: jsonBody(
      z.strictObject({
        target: z.union([
          z.strictObject({ snapshot: referenceSchema }),
          z.strictObject({ content: referenceSchema }),
        ]),
        purpose: nameSchema,
        allowSuspect: z.boolean().optional(),
      }),
    ),
  },
  responses: { 201: jsonAnswer(holdSchema, 'Held.'), ...problemResponses },
});

const listHolds = createRoute({
  method: 'get',
  path: '/v1/holds',
  tags: ['holds'],
  summary: 'Open holds of all nodes; with `closed`, the released ones instead.',
  middleware: needs('read'),
  request: {
    query: z.strictObject({
      content: referenceSchema.optional(),
      closed: z.enum(['true', 'false']).optional(),
      limit: wholeNumber.optional(),
    }),
  },
  responses: {
    200: jsonAnswer(z.object({ holds: z.array(holdSchema).readonly() }), 'The holds.'),
    ...problemResponses,
  },
});

const releaseHold = createRoute({
  method: 'delete',
  path: '/v1/holds/{holdId}',
  tags: ['holds'],
  summary: 'Release a hold. Releasing it again is fine.',
  middleware: needs('capture'),
  request: { params: z.object({ holdId: nameSchema }) },
  responses: { 204: { description: 'Released.' }, ...problemResponses },
});

/** A retry with the same key names the same hold, even after a restart of the daemon. */
function newHoldId(idempotencyKey: string | undefined, principal: string): HoldId {
  if (idempotencyKey === undefined) return holdId(randomUUID());
  const hash = createHash('sha256').update(`${principal}\n${idempotencyKey}`).digest('hex');
  const parts = [
    [0, 8],
    [8, 12],
    [12, 16],
    [16, 20],
    [20, 32],
  ] as const;
  return holdId(parts.map(([from, to]) => hash.slice(from, to)).join('-'));
}

export function holdRoutes(deps: { readonly catalog: Catalog; readonly nodeId: NodeId }) {
  const { catalog, nodeId } = deps;
  return newRouter()
    .openapi(takeHold, async (c) => {
      const { target, purpose, allowSuspect } = c.req.valid('json');
      const key = c.req.header('idempotency-key');
      const held = await catalog.hold({
        holdId: newHoldId(key, c.get('principal').name),
        nodeId,
        target: 'snapshot' in target ? target : { content: contentId(target.content) },
        purpose,
        allowSuspect,
      });
      const hold = valueOf(held);
      c.header('Location', `/v1/holds/${encodeURIComponent(hold.id)}`);
      return c.json(hold, 201);
    })
    .openapi(listHolds, async (c) => {
      const { content, closed, limit } = c.req.valid('query');
      const holds = await catalog.listHolds({
        contentId: content === undefined ? undefined : contentId(content),
        closed: closed === 'true',
        limit,
      });
      return c.json({ holds: valueOf(holds) }, 200);
    })
    .openapi(releaseHold, async (c) => {
      valueOf(await catalog.release(holdId(c.req.valid('param').holdId)));
      return c.body(null, 204);
    });
}

const volumeParams = z.object({ volumeId: nameSchema });

const createVolume = createRoute({
  method: 'post',
  path: '/v1/volumes',
  tags: ['volumes'],
  summary: 'Create a volume backed by a content.',
  middleware: needs('admin'),
  request: { body: jsonBody(z.strictObject({ id: aliasSchema, contentId: referenceSchema })) },
  responses: { 201: jsonAnswer(volumeSchema, 'Created.'), ...problemResponses },
});

const listVolumes = createRoute({
  method: 'get',
  path: '/v1/volumes',
  tags: ['volumes'],
  summary: 'Volumes in order of their ids; `after` is the last id of the page before.',
  middleware: needs('read'),
  request: {
    query: z.strictObject({ after: nameSchema.optional(), limit: wholeNumber.optional() }),
  },
  responses: {
    200: jsonAnswer(z.object({ volumes: z.array(volumeSchema).readonly() }), 'One page.'),
    ...problemResponses,
  },
});

const showVolume = createRoute({
  method: 'get',
  path: '/v1/volumes/{volumeId}',
  tags: ['volumes'],
  summary: 'One volume.',
  middleware: needs('read'),
  request: { params: volumeParams },
  responses: { 200: jsonAnswer(volumeSchema, 'The volume.'), ...problemResponses },
});

const switchVolume = createRoute({
  method: 'post',
  path: '/v1/volumes/{volumeId}/switch',
  tags: ['volumes'],
  summary: 'Back a volume by another content, if it is still at `version`.',
  middleware: needs('admin'),
  request: {
    params: volumeParams,
    body: jsonBody(z.strictObject({ version: z.int().min(1), contentId: referenceSchema })),
  },
  responses: { 200: jsonAnswer(volumeSchema, 'Switched.'), ...problemResponses },
});

const deleteVolume = createRoute({
  method: 'delete',
  path: '/v1/volumes/{volumeId}',
  tags: ['volumes'],
  summary: 'Delete a volume. Deleting it again is fine.',
  middleware: needs('admin'),
  request: { params: volumeParams },
  responses: { 204: { description: 'Deleted.' }, ...problemResponses },
});

export function volumeRoutes({ catalog }: { readonly catalog: Catalog }) {
  return newRouter()
    .openapi(createVolume, async (c) => {
      const { id, contentId: content } = c.req.valid('json');
      const made = await catalog.createVolume({ id, contentId: contentId(content) });
      c.header('Location', `/v1/volumes/${encodeURIComponent(id)}`);
      return c.json(valueOf(made), 201);
    })
    .openapi(listVolumes, async (c) => {
      const { after, limit } = c.req.valid('query');
      const page = await catalog.listVolumes({
        ...(after === undefined ? {} : { after }),
        ...(limit === undefined ? {} : { limit }),
      });
      return c.json({ volumes: valueOf(page) }, 200);
    })
    .openapi(showVolume, async (c) =>
      c.json(valueOf(await catalog.findVolume(c.req.valid('param').volumeId)), 200),
    )
    .openapi(switchVolume, async (c) => {
      const { version, contentId: content } = c.req.valid('json');
      const id = c.req.valid('param').volumeId;
      const request = { id, version, contentId: contentId(content) };
      return c.json(valueOf(await catalog.switchVolume(request)), 200);
    })
    .openapi(deleteVolume, async (c) => {
      valueOf(await catalog.deleteVolume(c.req.valid('param').volumeId));
      return c.body(null, 204);
    });
}
