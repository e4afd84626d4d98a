/** `/v1/vms`: attach, list, show, detach; captures and forks of a VM. */
import { createRoute, z } from '@hono/zod-openapi';
import type { Captures } from '../capture/types.ts';
import { confinePath } from '../config/roots.ts';
import { snapshotId, vmId } from '../units.ts';
import { needs } from './auth.ts';
import { problemResponses, refused, valueOf } from './problem.ts';
import { newRouter } from './router.ts';
import {
  attachSchema,
  captureRequestSchema,
  captureSchema,
  forkRequestSchema,
  forkSchema,
  jsonAnswer,
  jsonBody,
  nameSchema,
  vmSchema,
} from './schemas.ts';

export interface VmRoutesDeps {
  readonly captures: Captures;
  /** Folders that VMs' API sockets must lie under. */
  readonly socketRoots: readonly string[];
}

const params = z.object({ vmId: nameSchema });
const tags = ['vms'];

const attach = createRoute({
  method: 'post',
  path: '/v1/vms',
  tags,
  summary: 'Attach a VM by its API socket. Attaching the same process again returns the same VM.',
  middleware: needs('capture'),
  request: { body: jsonBody(attachSchema) },
  responses: { 201: jsonAnswer(vmSchema, 'Attached.'), ...problemResponses },
});

const list = createRoute({
  method: 'get',
  path: '/v1/vms',
  tags,
  summary: 'All attached VMs.',
  middleware: needs('read'),
  responses: {
    200: jsonAnswer(z.object({ vms: z.array(vmSchema).readonly() }), 'The VMs.'),
    ...problemResponses,
  },
});

const show = createRoute({
  method: 'get',
  path: '/v1/vms/{vmId}',
  tags,
  summary: 'One VM.',
  middleware: needs('read'),
  request: { params },
  responses: { 200: jsonAnswer(vmSchema, 'The VM.'), ...problemResponses },
});

const detach = createRoute({
  method: 'delete',
  path: '/v1/vms/{vmId}',
  tags,
  summary: 'Detach a VM. It goes on running; its published snapshots stay.',
  middleware: needs('capture'),
  request: { params },
  responses: { 204: { description: 'Detached.' }, ...problemResponses },
});

const capture = createRoute({
  method: 'post',
  path: '/v1/vms/{vmId}/captures',
  tags,
  summary: 'Start a capture. It goes on whether or not its caller waits for it.',
  middleware: needs('capture'),
  request: { params, body: jsonBody(captureRequestSchema) },
  responses: { 202: jsonAnswer(captureSchema, 'Started.'), ...problemResponses },
});

const listCaptures = createRoute({
  method: 'get',
  path: '/v1/vms/{vmId}/captures',
  tags,
  summary: 'Captures of one VM.',
  middleware: needs('read'),
  request: { params },
  responses: {
    200: jsonAnswer(z.object({ captures: z.array(captureSchema).readonly() }), 'The captures.'),
    ...problemResponses,
  },
});

const fork = createRoute({
  method: 'post',
  path: '/v1/vms/{vmId}/forks',
  tags,
  summary: 'Capture a VM and start children from that capture, in VMMs that have not booted.',
  middleware: needs('capture'),
  request: { params, body: jsonBody(forkRequestSchema) },
  responses: { 201: jsonAnswer(forkSchema, 'What became of each child.'), ...problemResponses },
});

export function vmRoutes(deps: VmRoutesDeps) {
  const { captures } = deps;
  const confined = (path: string): string => valueOf(confinePath(path, deps.socketRoots));
  const known = (id: string) => {
    const vm = captures.getVm(vmId(id));
    if (vm === undefined) throw refused('vm-unknown', `no VM ${id} is attached`);
    return vm;
  };
  return newRouter()
    .openapi(attach, async (c) => {
      const { socketPath, vmId: name, launchParent, trackingMode } = c.req.valid('json');
      const attached = await captures.attach({
        socketPath: confined(socketPath),
        vmId: name,
        trackingMode,
        launchParent: launchParent === undefined ? undefined : snapshotId(launchParent),
      });
      const vm = valueOf(attached);
      c.header('Location', `/v1/vms/${encodeURIComponent(vm.vmId)}`);
      return c.json(vm, 201);
    })
    .openapi(list, (c) => c.json({ vms: captures.listVms() }, 200))
    .openapi(show, (c) => c.json(known(c.req.valid('param').vmId), 200))
    .openapi(detach, async (c) => {
      const vm = known(c.req.valid('param').vmId);
      valueOf(await captures.detach(vm.vmId));
      return c.body(null, 204);
    })
    .openapi(capture, async (c) => {
      const vm = known(c.req.valid('param').vmId);
      const idempotencyKey = c.req.header('idempotency-key');
      const request = { ...c.req.valid('json'), idempotencyKey };
      const started = valueOf(await captures.startCapture(vm.vmId, request));
      c.header('Location', `/v1/captures/${encodeURIComponent(started.captureId)}`);
      return c.json(started, 202);
    })
    .openapi(listCaptures, (c) => {
      const vm = known(c.req.valid('param').vmId);
      return c.json({ captures: captures.listCaptures(vm.vmId) }, 200);
    })
    .openapi(fork, async (c) => {
      const vm = known(c.req.valid('param').vmId);
      const idempotencyKey = c.req.header('idempotency-key');
      const { children, ...request } = c.req.valid('json');
      const places = children.map((child) => ({
        ...child,
        socketPath: confined(child.socketPath),
      }));
      const forked = await captures.fork(vm.vmId, {
        ...request,
        children: places,
        idempotencyKey,
      });
      return c.json(valueOf(forked), 201);
    });
}
