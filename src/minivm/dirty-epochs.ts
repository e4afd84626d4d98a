import type { Hono } from 'hono';
import { z } from 'zod';
import { parseBody } from './answer.ts';
import { rangesAnswer } from './dialect-aenv.ts';
import type { Guest } from './guest.ts';

const epochAction = z.strictObject({ action: z.enum(['begin', 'commit', 'abort']) });

/** VMM-side epochs, as `docs/vmm-epochs.md` proposes them to VMM authors. */
export function dirtyEpochRoutes(app: Hono, guest: Guest): void {
  app.get('/vm/dirty-epoch', (c) => c.json(guest.vm.epoch('status')));
  app.put('/vm/dirty-epoch', async (c) => {
    const { action } = await parseBody(c, epochAction);
    return c.json(guest.vm.epoch(action));
  });
  app.get('/vm/removed-memory-ranges', (c) => rangesAnswer(c, guest, 'removed'));
}
