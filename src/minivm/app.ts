import { Hono } from 'hono';
import { refuse } from './answer.ts';
import { bootConfigRoutes } from './boot-config.ts';
import { controlRoutes } from './control.ts';
import { aenvRoutes } from './dialect-aenv.ts';
import { e2bRoutes } from './dialect-e2b.ts';
import { dirtyEpochRoutes } from './dirty-epochs.ts';
import { ScriptedFaults } from './faults.ts';
import type { Guest } from './guest.ts';
import { snapshotRoutes } from './snapshot.ts';
import { vmActionRoutes } from './vm-actions.ts';

/** The API of one VM: Firecracker's, its dialect's, and the small VM's own. */
export function vmApi(guest: Guest): Hono {
  const app = new Hono();
  const faults = new ScriptedFaults(guest);
  app.use(faults.middleware());
  bootConfigRoutes(app, guest);
  vmActionRoutes(app, guest);
  snapshotRoutes(app, guest);
  const { dialect, dirtyEpochs } = guest.options;
  if (dialect === 'aenv' || dialect === 'all') aenvRoutes(app, guest);
  if (dialect === 'e2b' || dialect === 'all') e2bRoutes(app, guest);
  if (dirtyEpochs) dirtyEpochRoutes(app, guest);
  app.route('/minivm', controlRoutes(guest, faults));
  app.notFound((c) =>
    refuse(c, `Invalid request method and/or path: ${c.req.method} ${c.req.path.slice(1)}.`),
  );
  app.onError((error, c) => {
    if (guest.broken) setTimeout(() => process.exit(1), 20);
    return refuse(c, error.message);
  });
  return app;
}
