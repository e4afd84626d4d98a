import type { Hono } from 'hono';
import { z } from 'zod';
import { noContent, parseBody, VmmFault } from './answer.ts';
import { vmConfig } from './boot-config.ts';
import type { Guest } from './guest.ts';

const action = z.strictObject({
  action_type: z.enum(['InstanceStart', 'FlushMetrics', 'SendCtrlAltDel']),
});
const vmPatch = z.strictObject({ state: z.enum(['Paused', 'Resumed']) });

/** Who the VM is, starting it, pausing and resuming it. */
export function vmActionRoutes(app: Hono, guest: Guest): void {
  app.get('/', (c) =>
    c.json({
      id: guest.options.id,
      state: guest.state,
      vmm_version: guest.vmmVersion,
      app_name: 'Firecracker',
      minivm: { backend: guest.backend, backend_reason: guest.backendReason },
    }),
  );
  app.get('/version', (c) => c.json({ firecracker_version: guest.vmmVersion }));
  app.get('/vm/config', (c) => c.json(vmConfig(guest)));
  app.put('/actions', async (c) => {
    const { action_type: type } = await parseBody(c, action);
    if (type === 'InstanceStart') guest.start();
    else if (type === 'SendCtrlAltDel') throw new VmmFault('This VM has no keyboard');
    return noContent(c);
  });
  app.patch('/vm', async (c) => {
    const { state } = await parseBody(c, vmPatch);
    if (state === 'Paused') guest.pause();
    else guest.resume();
    return noContent(c);
  });
}
