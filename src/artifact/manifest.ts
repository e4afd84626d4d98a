/**
 * The manifest: everything needed to rebuild the same runtime input. JSON, one artifact per
 * content, versioned; a reader refuses a version it does not know, and a writer never changes the
 * meaning of a field.
 */
import { z } from 'zod';
import { err, ok, type Result } from '../result.ts';
import { CHAIN_LAYERS_MAX, isDigest } from '../units.ts';

/** Largest manifest that is read, bytes: 255 layers take about 100 KiB. */
export const manifestBytesMax = 4 * 1024 * 1024;

const safeSize = z.int().min(0);
const uuid = z.string().regex(/^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$/);
const digest = z.string().refine(isDigest, 'must be sha256: and 64 hex digits');
/** 64-bit addresses are decimal text: a JSON number would round. */
const address = z.string().regex(/^\d{1,20}$/);

const artifact = z.strictObject({ key: z.string().min(1).max(200), digest, size: safeSize });

const layer = z.strictObject({
  uuid,
  predecessor: uuid.nullable(),
  digest,
  size: safeSize,
  artifact: z.string().min(1).max(200),
});

const region = z.strictObject({
  guestAddress: address.nullable(),
  imageOffset: safeSize,
  length: z.int().min(1),
});

export const manifestSchema = z
  .strictObject({
    version: z.literal(1),
    snapshotId: z.string().min(1),
    contentId: z.string().min(1),
    createdAtMs: z.int(),
    source: z.strictObject({
      vm: z.string(),
      node: z.string(),
      captureId: z.string(),
      epoch: z.int().min(0),
    }),
    memory: z.strictObject({
      /** Size of the memory file, bytes. */
      size: safeSize,
      pageSize: z.literal(4096),
      regions: z.array(region).min(1),
      /** Bottom to top; the last is the head. */
      layers: z.array(layer).min(1).max(CHAIN_LAYERS_MAX),
    }),
    vmState: artifact.nullable(),
    /** Heads of other roles (`rootfs`, `drive:<id>`), by layer uuid. */
    heads: z.record(z.string(), uuid),
    vmm: z.strictObject({
      dialect: z.enum(['firecracker', 'aenv', 'e2b']),
      version: z.string(),
      trackingMode: z.enum(['mincore', 'dirty', 'pagemap']),
      virtualization: z.string(),
      vcpuCount: z.int().min(1).nullable(),
    }),
    host: z.strictObject({
      architecture: z.string(),
      cpuModel: z.string(),
      kernel: z.string(),
    }),
  })
  .superRefine((manifest, context) => {
    let predecessor: string | null = null;
    manifest.memory.layers.forEach((each, index) => {
      if (each.predecessor !== predecessor) {
        const path = ['memory', 'layers', index, 'predecessor'];
        context.addIssue({ code: 'custom', path, message: 'must name the layer below' });
      }
      predecessor = each.uuid;
    });
    let end = 0;
    manifest.memory.regions.forEach((each, index) => {
      if (each.imageOffset !== end) {
        const path = ['memory', 'regions', index, 'imageOffset'];
        context.addIssue({ code: 'custom', path, message: 'must follow the region before' });
      }
      end = each.imageOffset + each.length;
    });
    if (end !== manifest.memory.size) {
      const path = ['memory', 'size'];
      context.addIssue({ code: 'custom', path, message: 'must be the sum of the regions' });
    }
  });

export type Manifest = z.infer<typeof manifestSchema>;

export interface ManifestError {
  readonly kind: 'manifest-invalid';
  readonly message: string;
}

export function encodeManifest(manifest: Manifest): Uint8Array {
  return new TextEncoder().encode(`${JSON.stringify(manifestSchema.parse(manifest), null, 1)}\n`);
}

/** @param what names the manifest in the message */
export function decodeManifest(bytes: Uint8Array, what: string): Result<Manifest, ManifestError> {
  const fail = (why: string): Result<never, ManifestError> =>
    err({ kind: 'manifest-invalid', message: `manifest ${what}: ${why}` });
  if (bytes.length > manifestBytesMax) return fail(`${bytes.length} bytes are too many`);
  let parsed: unknown;
  try {
    parsed = JSON.parse(new TextDecoder('utf-8', { fatal: true }).decode(bytes));
  } catch {
    return fail('not JSON text');
  }
  const checked = manifestSchema.safeParse(parsed);
  return checked.success ? ok(checked.data) : fail(z.prettifyError(checked.error));
}
