import type { Hono } from 'hono';
import { z } from 'zod';
import { noContent, parseBody, VmmFault } from './answer.ts';
import type { Guest } from './guest.ts';

const path = z.string().min(1).max(4096);
const create = z.strictObject({
  snapshot_type: z.enum(['Full', 'Diff']).default('Full'),
  snapshot_path: path,
  mem_file_path: path,
  version: z.string().optional(),
});
/** The forks made the memory file optional: without it only the VM state is saved. */
const createStateOnly = create.extend({ mem_file_path: path.nullish() });

const load = z
  .strictObject({
    snapshot_path: path,
    mem_file_path: path.optional(),
    mem_backend: z
      .strictObject({ backend_type: z.enum(['File', 'Uffd']), backend_path: path })
      .optional(),
    enable_diff_snapshots: z.boolean().optional(),
    track_dirty_pages: z.boolean().optional(),
    resume_vm: z.boolean().default(false),
    network_overrides: z.array(z.unknown()).optional(),
    vsock_override: z.unknown().optional(),
  })
  .refine((body) => (body.mem_file_path === undefined) !== (body.mem_backend === undefined), {
    error: 'exactly one of `mem_backend` and `mem_file_path` is needed',
  });

/** `PUT /snapshot/create` and `PUT /snapshot/load`. */
export function snapshotRoutes(app: Hono, guest: Guest): void {
  const schema = guest.options.dialect === 'firecracker' ? create : createStateOnly;
  app.put('/snapshot/create', async (c) => {
    const body = await parseBody(c, schema);
    if (guest.state === 'Running') {
      throw new VmmFault(
        'Create snapshot error: Cannot save the microVM state: the microVM is running.',
      );
    }
    guest.snapshot(body.snapshot_type, body.snapshot_path, body.mem_file_path ?? undefined);
    return noContent(c);
  });
  app.put('/snapshot/load', async (c) => {
    const body = await parseBody(c, load);
    guest.load({
      snapshotPath: body.snapshot_path,
      backing: body.mem_backend?.backend_type ?? 'File',
      memoryPath: body.mem_backend?.backend_path ?? body.mem_file_path ?? '',
      track: body.track_dirty_pages ?? body.enable_diff_snapshots ?? false,
      resume: body.resume_vm,
    });
    return noContent(c);
  });
}
