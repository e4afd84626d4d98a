import { createAdaptorServer } from '@hono/node-server';
import { existsSync, rmSync } from 'node:fs';
import { parseArgs } from 'node:util';
import { z } from 'zod';
import { vmApi } from './app.ts';
import { backends, dialects, Guest } from './guest.ts';

const args = z.strictObject({
  'api-sock': z.string().min(1, 'the path of the API socket is needed'),
  id: z.string().default('anonymous-instance'),
  dialect: z.enum(dialects).default('firecracker'),
  backend: z.enum(backends).default('auto'),
  'dirty-epochs': z.boolean().default(false),
  'upstream-state': z.boolean().default(false),
  'transparent-huge-pages': z.boolean().default(false),
  'exit-with-stdin': z.boolean().default(false),
});

function readArgs(): z.infer<typeof args> {
  const { values } = parseArgs({
    options: {
      'api-sock': { type: 'string' },
      id: { type: 'string' },
      dialect: { type: 'string' },
      backend: { type: 'string' },
      'dirty-epochs': { type: 'boolean' },
      'upstream-state': { type: 'boolean' },
      'transparent-huge-pages': { type: 'boolean' },
      'exit-with-stdin': { type: 'boolean' },
    },
  });
  const parsed = args.safeParse(values);
  if (!parsed.success) throw new Error(z.prettifyError(parsed.error));
  return parsed.data;
}

/** Serves the API until the process is ended. Prints one line of JSON once the socket listens. */
function serve(): void {
  const given = readArgs();
  const socketPath = given['api-sock'];
  if (existsSync(socketPath)) throw new Error(`the API socket ${socketPath} already exists`);
  const guest = new Guest({
    id: given.id,
    dialect: given.dialect,
    backend: given.backend,
    dirtyEpochs: given['dirty-epochs'],
    upstreamState: given['upstream-state'],
    hugePages: given['transparent-huge-pages'],
  });
  const server = createAdaptorServer({ fetch: vmApi(guest).fetch });
  process.on('exit', () => rmSync(socketPath, { force: true }));
  for (const signal of ['SIGTERM', 'SIGINT'] as const) process.on(signal, () => process.exit(0));
  if (given['exit-with-stdin']) {
    // The pipe's other end is the parent: it closes when the parent dies, however it dies.
    process.stdin.on('end', () => process.exit(0)).resume();
  }
  server.on('error', (error: Error) => {
    process.stderr.write(`minivm: ${error.message}\n`);
    process.exit(1);
  });
  server.listen(socketPath, () => {
    const { backend, backendReason } = guest;
    const ready = { ready: true, pid: process.pid, socketPath, backend, backendReason };
    process.stdout.write(`${JSON.stringify(ready)}\n`);
  });
}

try {
  serve();
} catch (error) {
  process.stderr.write(`minivm: ${error instanceof Error ? error.message : String(error)}\n`);
  process.exit(1);
}
