/**
 * What an artifact store is: immutable objects of bytes under keys that are never reused.
 * Nothing here assumes a filesystem, except `localPath`, which other stores answer with null.
 *
 * A1 An object is visible under its key only whole, durable and read-only.
 * A2 A key names one object for good; `put` never overwrites.
 * A3 A read that names a digest never returns bytes of another: it fails with `digest-mismatch`.
 */
import { randomUUID } from 'node:crypto';
import type { Result } from '../result.ts';
import { artifactKey, isDigest } from '../units.ts';
import type { ArtifactKey, Bytes, Digest } from '../units.ts';

export const artifactKinds = ['layer', 'manifest', 'vm-state', 'export', 'other'] as const;
export type ArtifactKind = (typeof artifactKinds)[number];

/** One object: where it is, and what its bytes must be. */
export interface StoredArtifact {
  /** `<kind>/<64 hex digits of the digest>/<artifact id>`. */
  readonly key: ArtifactKey;
  readonly kind: ArtifactKind;
  readonly digest: Digest;
  readonly sizeBytes: Bytes;
}

export type ArtifactErrorKind =
  | 'artifact-missing'
  | 'artifact-exists'
  | 'artifact-key-invalid'
  | 'artifact-too-large'
  | 'digest-mismatch'
  | 'source-missing'
  | 'store-no-space'
  | 'store-io'
  | 'cancelled';

export interface ArtifactError {
  readonly kind: ArtifactErrorKind;
  readonly message: string;
  readonly key: string;
  /** The system's error code (`ENOSPC`, …), where there was one. */
  readonly code?: string;
}

/** Whether the same call may succeed later without anyone changing its arguments. */
export const artifactRetryable = {
  'artifact-missing': false,
  'artifact-exists': false,
  'artifact-key-invalid': false,
  'artifact-too-large': false,
  'digest-mismatch': false,
  'source-missing': false,
  'store-no-space': true,
  'store-io': true,
  cancelled: false,
} satisfies Record<ArtifactErrorKind, boolean>;

/**
 * One thing found in the store. `key` is null where the name is none of ours: reported, never
 * deleted.
 */
export interface ListedObject {
  readonly key: ArtifactKey | null;
  readonly name: string;
  readonly sizeBytes: Bytes;
  readonly modifiedAtMs: number;
}

export interface PutRequest {
  /** From `Catalog.recordUpload`, which must have committed before. */
  readonly artifact: StoredArtifact;
  /** A finished file that nobody writes any more. */
  readonly sourcePath: string;
  readonly signal: AbortSignal;
}

/** Asked right before a physical delete; false leaves the object alone. */
export type Fence = () => Promise<boolean>;

export interface ArtifactStore {
  /**
   * Stores a file. Putting the same artifact again succeeds; other bytes under its key are
   * `artifact-exists`.
   */
  put(request: PutRequest): Promise<Result<StoredArtifact, ArtifactError>>;
  /** Size of the object; `artifact-missing` where there is none. Does not read its bytes. */
  head(key: ArtifactKey): Promise<Result<{ readonly sizeBytes: Bytes }, ArtifactError>>;
  /** Whole small object, verified before anything is returned. */
  readAll(
    artifact: StoredArtifact,
    maxBytes: Bytes,
    signal: AbortSignal,
  ): Promise<Result<Uint8Array, ArtifactError>>;
  /**
   * Copies into a new file that exists under `targetPath` only when verified, synced and mode 0444.
   */
  fetch(
    artifact: StoredArtifact,
    targetPath: string,
    signal: AbortSignal,
  ): Promise<Result<void, ArtifactError>>;
  /** Reads every byte and compares size and digest. */
  verify(artifact: StoredArtifact, signal: AbortSignal): Promise<Result<void, ArtifactError>>;
  /**
   * Everything in the store, in no order. Throws `Failure<ArtifactError>` when a part cannot be
   * read.
   */
  list(signal: AbortSignal): AsyncIterable<ListedObject>;
  /**
   * Deletes for good, if the fence still holds. A missing object is `missing`, which callers count
   * as deleted.
   */
  delete(
    key: ArtifactKey,
    fence: Fence,
  ): Promise<Result<'deleted' | 'missing' | 'fenced', ArtifactError>>;
  /**
   * Where a store on a filesystem keeps the object, for readers that need a path; null elsewhere.
   */
  localPath(key: ArtifactKey): string | null;
}

const uuidPattern = '[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}';
const keyPattern = new RegExp(`^([a-z-]{1,16})/([0-9a-f]{64})/(${uuidPattern})$`);

/** Names a new object. The id is random, so no key is ever made twice. */
export function newArtifact(facts: Omit<StoredArtifact, 'key'>): StoredArtifact {
  const hex = facts.digest.slice('sha256:'.length);
  return { key: artifactKey(`${facts.kind}/${hex}/${randomUUID()}`), ...facts };
}

export interface KeyParts {
  readonly kind: ArtifactKind;
  readonly digest: Digest;
  readonly id: string;
}

/** The parts of a key, or undefined for text that is none. */
export function parseArtifactKey(key: string): KeyParts | undefined {
  const match = key.length > 200 ? null : keyPattern.exec(key);
  const kind = artifactKinds.find((known) => known === match?.[1]);
  const digest = `sha256:${match?.[2] ?? ''}`;
  const id = match?.[3];
  if (kind === undefined || id === undefined || !isDigest(digest)) return undefined;
  return { kind, digest, id };
}
