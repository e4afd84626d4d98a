/** RFC 9457 problem documents: one table says which status each failure has. */
import { z } from '@hono/zod-openapi';
import type { ContentfulStatusCode } from 'hono/utils/http-status';
import type { ArtifactErrorKind } from '../artifact/store.ts';
import type { CatalogErrorKind, CatalogRefusalKind } from '../catalog/errors.ts';
import type { RootsError } from '../config/roots.ts';
import type { NodeDbFailureKind } from '../lineage/failures.ts';
import type { VmmErrorKind } from '../vmm/errors.ts';
import { Failure, type FailureDetail, type Result } from '../result.ts';

/** Failures of the HTTP layer itself. */
export type RequestErrorKind =
  | 'body-too-large'
  | 'forbidden'
  | 'host-refused'
  | 'method-not-allowed'
  | 'origin-refused'
  | 'idempotency-key-busy'
  | 'idempotency-key-reused'
  | 'internal'
  | 'malformed-body'
  | 'mass-delete'
  | 'route-missing'
  | 'unauthorized'
  | 'unsupported-media-type';

/** Failures of attaching and capturing that are not those of the parts below. */
export type CaptureErrorKind =
  | 'busy'
  | 'capture-not-cancellable'
  | 'daemon-stopping'
  | 'manifest-invalid'
  | 'no-memory'
  | 'not-offered'
  | 'precopy-unsupported'
  | 'snapshot-without-memory'
  | 'vm-id-invalid'
  | 'vm-not-started';

export type ProblemCode =
  | ArtifactErrorKind
  | NodeDbFailureKind
  | VmmErrorKind
  | CaptureErrorKind
  | CatalogErrorKind
  | CatalogRefusalKind
  | RequestErrorKind
  | RootsError['kind'];

/** Status of every failure that the API can answer with. The code in the document is the kind. */
export const httpStatus = {
  'alias-taken': 409,
  'artifact-conflict': 409,
  'artifact-exists': 409,
  'artifact-key-invalid': 422,
  'artifact-missing': 404,
  'artifact-too-large': 413,
  'body-too-large': 413,
  busy: 429,
  cancelled: 409,
  'capture-not-cancellable': 409,
  'capture-running': 409,
  'capture-step': 409,
  'capture-unknown': 404,
  'catalog-busy': 503,
  'catalog-closed': 503,
  'catalog-corrupt': 500,
  'catalog-full': 507,
  'catalog-io': 500,
  'catalog-integer': 500,
  'catalog-newer': 500,
  'catalog-older': 500,
  'catalog-timeout': 504,
  'catalog-unavailable': 503,
  'chain-moved': 409,
  'chain-too-deep': 409,
  'compaction-running': 409,
  'compaction-unknown': 404,
  'content-conflict': 409,
  'content-missing': 404,
  'daemon-stopping': 503,
  'digest-mismatch': 500,
  forbidden: 403,
  'hold-conflict': 409,
  'hold-released': 409,
  'host-refused': 403,
  'method-not-allowed': 405,
  'origin-refused': 403,
  'idempotency-conflict': 422,
  'idempotency-key-busy': 409,
  'idempotency-key-reused': 422,
  internal: 500,
  'layer-conflict': 409,
  'layer-mismatch': 409,
  'layer-missing': 404,
  'layer-unknown': 404,
  'layout-changed': 409,
  'layout-unknown': 409,
  'malformed-body': 400,
  'mass-delete': 409,
  'manifest-invalid': 500,
  'memory-file-bad': 502,
  'vmm-file-bad': 502,
  'no-memory': 409,
  'node-db-corrupt': 500,
  'node-db-io': 500,
  'node-db-locked': 503,
  'node-db-newer': 500,
  'node-forgotten': 409,
  'node-unknown': 409,
  'not-offered': 501,
  'path-invalid': 422,
  'path-missing': 422,
  'path-outside-roots': 403,
  'permission-denied': 403,
  'precopy-unsupported': 400,
  'request-invalid': 422,
  'route-missing': 404,
  'set-not-widened': 500,
  'snapshot-conflict': 409,
  'snapshot-invalid': 409,
  'snapshot-suspect': 409,
  'snapshot-missing': 404,
  'snapshot-retired': 410,
  'snapshot-without-memory': 409,
  'source-missing': 500,
  'store-io': 500,
  'store-no-space': 507,
  'swap-on': 409,
  'tracking-off': 409,
  'tracking-unsupported': 409,
  unauthorized: 401,
  'unsupported-media-type': 415,
  'upload-missing': 409,
  'vm-exists': 409,
  'vm-attached': 409,
  'vm-exited': 409,
  'vm-id-invalid': 422,
  'vm-not-started': 409,
  'vm-ran': 409,
  'vm-replaced': 409,
  'vm-unknown': 404,
  'vmm-bad-answer': 502,
  'vmm-not-a-vmm': 422,
  'vmm-refused': 502,
  'vmm-timeout': 504,
  'vmm-unreachable': 502,
  'volume-conflict': 409,
  'volume-missing': 404,
  'volume-moved': 409,
} as const satisfies Record<ProblemCode, ContentfulStatusCode>;

const isKnown = (kind: string): kind is ProblemCode => Object.hasOwn(httpStatus, kind);

/** The status of a failure kind; 500 for one that is in no table, whose code is still answered. */
export const statusOf = (kind: string): ContentfulStatusCode =>
  isKnown(kind) ? httpStatus[kind] : 500;

export const problemSchema = z
  .object({
    type: z.string(),
    title: z.string(),
    status: z.int(),
    detail: z.string(),
    code: z.string(),
    requestId: z.string().optional(),
    errors: z.array(z.object({ pointer: z.string(), detail: z.string() })).optional(),
  })
  .openapi('Problem', { description: 'RFC 9457. `code` is stable; `detail` is for people.' });

export type Problem = z.infer<typeof problemSchema>;

/** What a failure may carry along: ids and numbers that a program can act on. */
interface WithFacts extends FailureDetail {
  readonly facts?: Readonly<Record<string, string | number | null>> | undefined;
  readonly subject?: string | undefined;
  readonly errors?: readonly { readonly pointer: string; readonly detail: string }[];
}

/** Words of kinds that are written in capitals. */
const shortNames = new Set(['vm', 'vmm', 'db', 'io', 'cpu']);

const title = (kind: string): string => {
  const words = kind
    .split('-')
    .map((word) => (shortNames.has(word) ? word.toUpperCase() : word))
    .join(' ');
  return words.charAt(0).toUpperCase() + words.slice(1);
};

/** The document of a failure. Facts become members of it and never replace the standard ones. */
export function toProblem(failure: WithFacts, requestId: string): Record<string, unknown> {
  return {
    ...failure.facts,
    ...(failure.subject === undefined ? {} : { subject: failure.subject }),
    ...(failure.errors === undefined ? {} : { errors: failure.errors }),
    type: `/docs/problems#${failure.kind}`,
    title: title(failure.kind),
    status: statusOf(failure.kind),
    detail: failure.message,
    code: failure.kind,
    requestId,
  };
}

/** A failure of the HTTP layer, to throw. */
export function refused(kind: ProblemCode, message: string): Failure {
  return new Failure({ kind, message });
}

/** The value of a result, or its error thrown: `onError` turns that into a problem document. */
export function valueOf<T, E extends FailureDetail>(result: Result<T, E>): T {
  if (result.ok) return result.value;
  throw new Failure(result.error);
}

/** The answers that every route can give besides its own. */
export const problemResponses = {
  default: {
    description: 'A problem document.',
    content: { 'application/problem+json': { schema: problemSchema } },
  },
} as const;
