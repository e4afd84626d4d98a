/**
 * Shapes of the VMM's small answers. Unknown fields are let pass: VMMs add some with every release.
 * Source: Firecracker's API definition; the fields of the forks are named in DESIGN §4.
 */
import { z } from 'zod';
import { safeCount, u64 } from './exact-json.ts';

export const runStates = ['Not started', 'Running', 'Paused'] as const;
export type RunState = (typeof runStates)[number];

/** `GET /`. */
export const instanceInfo = z.object({
  id: z.string().max(256),
  state: z.enum(runStates, { error: `must be one of ${runStates.join(', ')}` }),
  app_name: z.string().max(256),
  vmm_version: z.string().max(256),
});
export type InstanceInfo = z.infer<typeof instanceInfo>;

/** `GET /version`. */
export const versionInfo = z.object({ firecracker_version: z.string().max(256) });

/** `GET /machine-config`. `mem_size_mib` is MiB; `huge_pages` is absent before Firecracker 1.7. */
export const machineConfig = z.object({
  vcpu_count: safeCount,
  mem_size_mib: safeCount,
  track_dirty_pages: z.boolean().optional().default(false),
  smt: z.boolean().optional(),
  huge_pages: z.string().max(64).optional(),
  cpu_template: z.string().max(256).nullable().optional(),
});
export type MachineConfig = z.infer<typeof machineConfig>;

/** `GET /memory/mappings`. Sizes and offsets are bytes. */
export const memoryMappings = z.object({
  mappings: z
    .array(
      z.object({
        base_host_virt_addr: u64,
        size: u64,
        offset: u64,
        page_size: u64,
        guest_phys_addr: u64.optional(),
      }),
    )
    .max(4096),
});
export type MemoryMappings = z.infer<typeof memoryMappings>;

/** The body of every refusal. */
export const faultBody = z.object({ fault_message: z.string() });
