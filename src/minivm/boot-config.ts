import type { Hono } from 'hono';
import { z } from 'zod';
import { noContent, parseBody } from './answer.ts';
import type { Guest } from './guest.ts';
import { machineConfig } from './state-file.ts';

const bootSource = z.strictObject({
  kernel_image_path: z.string().min(1),
  initrd_path: z.string().nullish(),
  boot_args: z.string().nullish(),
});
const machineConfigPatch = machineConfig
  .extend({
    smt: z.boolean(),
    track_dirty_pages: z.boolean(),
    huge_pages: z.enum(['None']),
  })
  .partial();
const anyObject = z.record(z.string(), z.unknown());

/** Devices that orchestrators configure and this VM does not have: stored, without effect. */
const acceptedPaths = [
  '/drives/:id',
  '/network-interfaces/:id',
  '/pmem/:id',
  '/vsock',
  '/entropy',
  '/balloon',
  '/cpu-config',
  '/mmds/config',
  '/serial',
];
/** Like the above, but not specific to a boot: a snapshot may still be loaded after them. */
const hostPaths = ['/logger', '/metrics', '/mmds'];

/** Pre-boot configuration. Kernel and devices are accepted; size and tracking take effect. */
export function bootConfigRoutes(app: Hono, guest: Guest): void {
  app.get('/machine-config', (c) => c.json(guest.config));
  app.put('/machine-config', async (c) => {
    const config = await parseBody(c, machineConfig);
    guest.requireNotStarted();
    guest.config = config;
    guest.configured = true;
    return noContent(c);
  });
  app.patch('/machine-config', async (c) => {
    const patch = await parseBody(c, machineConfigPatch);
    guest.requireNotStarted();
    guest.config = machineConfig.parse({ ...guest.config, ...patch });
    guest.configured = true;
    return noContent(c);
  });
  app.put('/boot-source', async (c) => {
    const source = await parseBody(c, bootSource);
    guest.requireNotStarted();
    guest.stored.set('boot-source', source);
    guest.configured = true;
    return noContent(c);
  });
  for (const path of [...acceptedPaths, ...hostPaths]) {
    app.put(path, async (c) => {
      const body = await parseBody(c, anyObject);
      if (path !== '/mmds') guest.requireNotStarted();
      guest.stored.set(c.req.path.slice(1), body);
      if (acceptedPaths.includes(path)) guest.configured = true;
      return noContent(c);
    });
  }
}

/** `GET /vm/config`: what was configured, in Firecracker's shape. */
export function vmConfig(guest: Guest): Record<string, unknown> {
  const under = (prefix: string): unknown[] =>
    [...guest.stored].filter(([path]) => path.startsWith(prefix)).map(([, body]) => body);
  return {
    'boot-source': guest.stored.get('boot-source') ?? { kernel_image_path: '' },
    drives: under('drives/'),
    'machine-config': guest.config,
    'network-interfaces': under('network-interfaces/'),
  };
}
