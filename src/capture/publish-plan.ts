/**
 * All that a publish needs beside the layer, fixed before the commit point and kept in node.db with
 * the capture: a publish after a crash does what the first would have done, under the same ids.
 */
import { z } from 'zod';
import { contentId, holdId, snapshotId } from '../units.ts';

const planSchema = z.strictObject({
  snapshotId: z.string().transform(snapshotId),
  contentId: z.string().transform(contentId),
  alias: z.string().nullable(),
  /** Taken by the publish, if somebody on this node still owns it. Plans of before have none. */
  hold: z.string().transform(holdId).nullable().default(null),
  /** Only the layer is wanted: the snapshot is retired as soon as it is published. */
  retire: z.boolean().default(false),
  createdAtMs: z.int(),
  vm: z.string(),
  epoch: z.int(),
  predecessor: z.string().nullable(),
  vmStatePath: z.string().nullable(),
  stagingFolder: z.string(),
  imageBytes: z.int(),
  regions: z.array(
    z.strictObject({
      guestAddress: z.string().nullable(),
      imageOffset: z.int(),
      length: z.int(),
    }),
  ),
  vmm: z.strictObject({
    dialect: z.enum(['firecracker', 'aenv', 'e2b']),
    version: z.string(),
    trackingMode: z.enum(['mincore', 'dirty', 'pagemap']),
    vcpuCount: z.int().nullable(),
  }),
});

export type PublishPlan = z.infer<typeof planSchema>;

/** Throws where node.db holds something else: it is ours alone, so that is damage. */
export const parsePublishPlan = (json: string): PublishPlan => planSchema.parse(JSON.parse(json));
