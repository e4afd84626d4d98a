/**
 * What the API takes and gives, as schemas. Ids are bounded here; what they mean is checked
 * below.
 */
import { z } from '@hono/zod-openapi';
import { stageNames } from '../capture/types.ts';
import { isName, NAME_RULE } from '../catalog/check.ts';
import { precopyRoundsMax } from '../config/pipeline.schema.ts';

/** Names that people choose: VMs, volumes, nodes. */
export const nameSchema = z
  .string()
  .regex(/^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$/, 'must be 1 to 128 of A-Z a-z 0-9 . _ -');
/** An id or an alias, as it can stand in a path. */
export const referenceSchema = z.string().min(1).max(256);
/** A name that is given for good: by the catalog's own rule, so that it is refused before anything else. */
export const aliasSchema = z
  .string()
  .refine(isName, { error: `must be ${NAME_RULE}` })
  .describe(`${NAME_RULE.charAt(0).toUpperCase()}${NAME_RULE.slice(1)}.`);
export const pathSchema = z.string().min(1).max(4096);
const timeMs = z.int().min(0);
const sizeBytes = z.int().min(0);

const trackingMode = z.enum(['mincore', 'dirty', 'pagemap']);
const resumeAfter = z.enum(['publish', 'commit', 'copy']);
const dedup = z.enum(['auto', 'off', 'parent']);
const failureSchema = z.object({ kind: z.string(), message: z.string() });

export const attachSchema = z
  .strictObject({
    socketPath: pathSchema,
    vmId: nameSchema.optional(),
    trackingMode: trackingMode.optional(),
    launchParent: referenceSchema.optional(),
  })
  .openapi('Attach');

export const vmSchema = z
  .object({
    vmId: z.string(),
    socketPath: z.string(),
    pid: z.int(),
    dialect: z.enum(['firecracker', 'aenv', 'e2b']),
    vmmVersion: z.string(),
    trackingMode,
    epoch: z.int(),
    memoryParent: z.string().nullable(),
    launchParent: z.string().nullable(),
    chainDepth: z.int(),
    imageBytes: sizeBytes.nullable(),
    pausedByUs: z.boolean(),
    captureId: z.string().nullable(),
    state: z.enum(['attached', 'unreachable', 'gone']),
  })
  .openapi('Vm');

export const captureRequestSchema = z
  .strictObject({
    resumeAfter: resumeAfter.optional(),
    dedup: dedup.optional(),
    alias: aliasSchema.optional(),
    pauseDeadlineMs: z.int().min(10).max(3_600_000).optional(),
    precopyRounds: z.int().min(0).max(precopyRoundsMax).optional(),
    verify: z.boolean().optional(),
  })
  .openapi('CaptureRequest');

const stageSchema = z.object({
  stage: z.enum(stageNames),
  startedMs: z.number(),
  endedMs: z.number(),
  busyMs: z.number(),
  frozenMs: z.number(),
  items: z.int(),
  bytes: sizeBytes,
});

const verifySchema = z.union([
  z.object({
    compared: z.literal('all'),
    pages: z.int().describe('Pages that no dirty set named: read and compared.'),
    differing: z.int().describe('Of those, pages that did not read as the memory parent does.'),
    ranges: z
      .array(z.object({ imageOffset: sizeBytes, length: sizeBytes }))
      .readonly()
      .describe('The first ranges that differ, in bytes of the image.'),
  }),
  z.object({ compared: z.literal('nothing'), reason: z.string() }),
]);

const shadowSchema = z.union([
  z.object({
    compared: z.enum(['all', 'not-stored-yet']),
    both: z.int(),
    primaryOnly: z.int(),
    shadowOnly: z.int(),
  }),
  z.object({ compared: z.literal('nothing'), reason: z.string() }),
]);

const resultSchema = z.object({
  snapshotId: z.string(),
  alias: z.string().nullable(),
  aliasProblem: failureSchema.nullable(),
  layer: z.string(),
  predecessor: z.string().nullable(),
  digest: z.string(),
  layerBytes: sizeBytes,
  dataBytes: sizeBytes,
  zeroedBytes: sizeBytes,
  selectedPages: z.int(),
  deduplicatedPages: z.int(),
  zeroPages: z.int(),
  precopyRounds: z.int(),
  precopiedPages: z.int(),
  supersededBytes: sizeBytes,
  imageBytes: sizeBytes,
  chainDepth: z.int(),
  epoch: z.int(),
  selection: z.enum(['epoch', 'cumulative', 'widened']),
  selectionReason: z.string().nullable(),
  shadow: shadowSchema.nullable(),
  verify: verifySchema.nullable(),
  frozenMs: z.number(),
  totalMs: z.number(),
  resumeAfter,
});

export const captureSchema = z
  .object({
    captureId: z.string(),
    vmId: z.string(),
    status: z.enum(['running', 'committed', 'published', 'aborted']),
    stage: z.enum(stageNames).nullable(),
    createdAtMs: timeMs,
    endedAtMs: timeMs.nullable(),
    result: resultSchema.nullable(),
    stages: z.array(stageSchema).readonly(),
    failure: failureSchema.nullable(),
    vmRunning: z.boolean().nullable(),
  })
  .openapi('Capture');

export const forkRequestSchema = captureRequestSchema
  .extend({
    children: z
      .array(z.strictObject({ socketPath: pathSchema, vmId: nameSchema.optional() }))
      .min(1)
      .max(64),
  })
  .openapi('ForkRequest');

export const forkSchema = z
  .object({
    capture: captureSchema,
    children: z
      .array(
        z.object({
          socketPath: z.string(),
          vm: vmSchema.nullable(),
          failure: failureSchema.nullable(),
        }),
      )
      .readonly(),
  })
  .openapi('Fork');

const artifactSchema = z.object({
  key: z.string(),
  kind: z.enum(['layer', 'manifest', 'vm-state', 'export', 'other']),
  digest: z.string(),
  sizeBytes,
});

export const snapshotSchema = z
  .object({
    id: z.string(),
    state: z.enum(['active', 'retired']),
    contentId: z.string(),
    sourceVm: z.string(),
    nodeId: z.string(),
    createdAtMs: timeMs,
    retiredAtMs: timeMs.nullable(),
    invalidReason: z.string().nullable(),
    suspectReason: z
      .string()
      .nullable()
      .describe('Set where a verification found that its layers lack pages.'),
    aliases: z.array(z.string()).readonly(),
  })
  .openapi('Snapshot');

export const contentSchema = z
  .object({
    id: z.string(),
    manifest: artifactSchema,
    heads: z.array(z.object({ role: z.string(), layer: z.string() })).readonly(),
    artifacts: z.array(z.object({ name: z.string(), artifact: artifactSchema })).readonly(),
  })
  .openapi('Content');

export const layerSchema = z
  .object({
    uuid: z.string(),
    predecessor: z.string().nullable(),
    virtualBytes: sizeBytes,
    depth: z.int(),
    artifact: artifactSchema,
    createdAtMs: timeMs,
    suspectReason: z.string().nullable(),
    complete: z.boolean().describe('Its capture looked at every page of the VM.'),
  })
  .openapi('Layer');

export const chainLayerSchema = layerSchema
  .extend({
    epoch: z
      .int()
      .nullable()
      .describe(
        'The epoch of its VM that it holds; null where it was not captured on this node, was merged ' +
          'with others, or has no file here any more.',
      ),
  })
  .openapi('ChainLayer');

export const holdSchema = z
  .object({
    id: z.string(),
    contentId: z.string().nullable(),
    nodeId: z.string().nullable(),
    purpose: z.string(),
    createdAtMs: timeMs,
    releasedAtMs: timeMs.nullable(),
  })
  .openapi('Hold');

export const volumeSchema = z
  .object({
    id: z.string(),
    contentId: z.string(),
    version: z.int(),
    createdAtMs: timeMs,
    switchedAtMs: timeMs,
  })
  .openapi('Volume');

/** A JSON body that must be there: without `required`, a missing content type would skip checks. */
export const jsonBody = <T extends z.ZodType>(schema: T) => ({
  required: true as const,
  content: { 'application/json': { schema } },
});

export const jsonAnswer = <T extends z.ZodType>(schema: T, description: string) => ({
  description,
  content: { 'application/json': { schema } },
});
