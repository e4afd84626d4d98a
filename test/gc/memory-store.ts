/**
 * An artifact store without a filesystem: what is above the interface must not notice. Quick, for
 * long runs.
 */
import { createHash } from 'node:crypto';
import { readFile } from 'node:fs/promises';
import type {
  ArtifactError,
  ArtifactErrorKind,
  ArtifactStore,
  Fence,
  ListedObject,
  PutRequest,
  StoredArtifact,
} from '../../src/artifact/store.ts';
import { err, ok } from '../../src/result.ts';
import type { Result } from '../../src/result.ts';
import { bytes } from '../../src/units.ts';
import type { ArtifactKey, Bytes } from '../../src/units.ts';

const failed = (kind: ArtifactErrorKind, key: string): Result<never, ArtifactError> =>
  err({ kind, key, message: `${key}: ${kind}` });

export class MemoryArtifactStore implements ArtifactStore {
  readonly objects = new Map<ArtifactKey, Uint8Array>();

  async put(request: PutRequest): Promise<Result<StoredArtifact, ArtifactError>> {
    return this.putBytes(request.artifact, await readFile(request.sourcePath));
  }

  putBytes(artifact: StoredArtifact, content: Uint8Array): Result<StoredArtifact, ArtifactError> {
    if (digestOf(content) !== artifact.digest) return failed('digest-mismatch', artifact.key);
    this.objects.set(artifact.key, content);
    return ok(artifact);
  }

  head(key: ArtifactKey): Promise<Result<{ readonly sizeBytes: Bytes }, ArtifactError>> {
    const content = this.objects.get(key);
    return Promise.resolve(
      content === undefined
        ? failed('artifact-missing', key)
        : ok({ sizeBytes: bytes(content.length) }),
    );
  }

  readAll(artifact: StoredArtifact): Promise<Result<Uint8Array, ArtifactError>> {
    const content = this.objects.get(artifact.key);
    if (content === undefined) return Promise.resolve(failed('artifact-missing', artifact.key));
    const isRight = digestOf(content) === artifact.digest;
    return Promise.resolve(isRight ? ok(content) : failed('digest-mismatch', artifact.key));
  }

  fetch(artifact: StoredArtifact): Promise<Result<void, ArtifactError>> {
    return Promise.resolve(failed('store-io', artifact.key));
  }

  async verify(artifact: StoredArtifact): Promise<Result<void, ArtifactError>> {
    const read = await this.readAll(artifact);
    return read.ok ? ok(undefined) : read;
  }

  // eslint-disable-next-line @typescript-eslint/require-await -- other stores list over a network
  async *list(): AsyncIterable<ListedObject> {
    for (const [key, content] of this.objects) {
      yield { key, name: key, sizeBytes: bytes(content.length), modifiedAtMs: 0 };
    }
  }

  async delete(
    key: ArtifactKey,
    fence: Fence,
  ): Promise<Result<'deleted' | 'missing' | 'fenced', ArtifactError>> {
    if (!(await fence())) return ok('fenced');
    return ok(this.objects.delete(key) ? 'deleted' : 'missing');
  }

  localPath(): null {
    return null;
  }
}

const digestOf = (content: Uint8Array): string =>
  `sha256:${createHash('sha256').update(content).digest('hex')}`;
