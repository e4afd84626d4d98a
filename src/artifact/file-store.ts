/**
 * An artifact store in a folder. `layer/<digest>/<id>` is the file `layer/<2 hex>/<64 hex>.<id>`.
 *
 * Order of a put: temp name in the same filesystem, fsync, mode 0444, rename that cannot overwrite,
 * fsync of the folder (A1). A source on the same filesystem is hard-linked instead of copied: it
 * must never be written again, which sealed layers are not. Copies are compared with the digest
 * while they are made; a link trusts the digest its sealer computed, and every read checks it (A3).
 */
import { createHash, randomUUID } from 'node:crypto';
import {
  link,
  mkdir,
  open,
  opendir,
  readFile,
  realpath,
  rename,
  stat,
  unlink,
} from 'node:fs/promises';
import type { FileHandle } from 'node:fs/promises';
import { basename, dirname, join } from 'node:path';
import { Failure, assert, err, ok, systemCode } from '../result.ts';
import type { Result } from '../result.ts';
import { systemClock } from '../clock.ts';
import type { Clock } from '../clock.ts';
import { MIB, artifactKey, bytes, isDigest } from '../units.ts';
import type { ArtifactKey, Bytes, NodeId } from '../units.ts';
import { createUnfinished, removeUnfinished, removeUnfinishedOf } from './unfinished.ts';
import { artifactKinds, parseArtifactKey } from './store.ts';
import type {
  ArtifactError,
  ArtifactErrorKind,
  ArtifactStore,
  Fence,
  ListedObject,
  PutRequest,
  StoredArtifact,
} from './store.ts';

const COPY_CHUNK_BYTES = MIB;
const TEMP_FOLDER = '.incoming';
const filePattern =
  /^([0-9a-f]{64})\.([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})$/;
/** What the filesystem says when a hard link cannot be made, and a copy may be. */
const unlinkable = new Set(['EXDEV', 'EPERM', 'EMLINK', 'ENOTSUP', 'ENOSYS', 'EOPNOTSUPP']);

export interface FileStoreConfig {
  readonly root: string;
  /** Whose unfinished objects are this process's to make and to remove. */
  readonly node: NodeId;
  readonly clock?: Pick<Clock, 'nowMs'> | undefined;
  /** `auto` (default) links where it can; `never` always copies. */
  readonly hardLinks?: 'auto' | 'never' | undefined;
}

export class FileArtifactStore implements ArtifactStore {
  readonly #root: string;
  readonly #node: NodeId;
  readonly #hardLinks: boolean;
  readonly #madeFolders = new Set<string>();

  private constructor(root: string, { node, hardLinks }: FileStoreConfig) {
    this.#root = root;
    this.#node = node;
    this.#hardLinks = hardLinks !== 'never';
  }

  /**
   * Makes the folder, and removes what interrupted puts of an earlier process of this node left in
   * it (`unfinished.ts`).
   */
  static async open(config: FileStoreConfig): Promise<Result<FileArtifactStore, ArtifactError>> {
    try {
      await mkdir(join(config.root, TEMP_FOLDER), { recursive: true });
      const root = await realpath(config.root);
      const nowMs = (config.clock ?? systemClock).nowMs();
      await removeUnfinished(join(root, TEMP_FOLDER), config.node, nowMs);
      return ok(new FileArtifactStore(root, config));
    } catch (error) {
      return err(toError(error, config.root, 'store-io'));
    }
  }

  /** Removes the unfinished objects of a node that will not be back. Returns how many there were. */
  forgetNode(node: NodeId): Promise<Result<number, ArtifactError>> {
    return guard(this.#root, () => removeUnfinishedOf(join(this.#root, TEMP_FOLDER), node));
  }

  /** The store's folder, without symbolic links. */
  get root(): string {
    return this.#root;
  }

  localPath(key: ArtifactKey): string {
    const parts = parseArtifactKey(key);
    if (parts === undefined) {
      throw new Failure<ArtifactError>(fail('artifact-key-invalid', key, 'not an artifact key'));
    }
    const hex = parts.digest.slice('sha256:'.length);
    return join(this.#root, parts.kind, hex.slice(0, 2), `${hex}.${parts.id}`);
  }

  put({
    artifact,
    sourcePath,
    signal,
  }: PutRequest): Promise<Result<StoredArtifact, ArtifactError>> {
    return guard(
      artifact.key,
      async () => {
        signal.throwIfAborted();
        const path = this.localPath(artifact.key);
        await this.#makeFolder(dirname(path));
        const linked = this.#hardLinks && (await linkSource(artifact, sourcePath, path));
        if (!linked) await this.#copyIn(artifact, sourcePath, path, signal);
        await syncPath(dirname(path));
        return artifact;
      },
      signal,
      // No object is missing to a put: a folder is, or somebody removed what it was writing.
      'store-io',
    );
  }

  head(key: ArtifactKey): Promise<Result<{ readonly sizeBytes: Bytes }, ArtifactError>> {
    return guard(key, async () => ({ sizeBytes: bytes((await stat(this.localPath(key))).size) }));
  }

  readAll(
    artifact: StoredArtifact,
    maxBytes: Bytes,
    signal: AbortSignal,
  ): Promise<Result<Uint8Array, ArtifactError>> {
    return guard(
      artifact.key,
      async () => {
        const path = this.localPath(artifact.key);
        const { size } = await stat(path);
        requireSize(artifact, size);
        if (size > maxBytes) {
          const message = `${size} bytes are more than the ${maxBytes} that may be read at once`;
          throw new Failure(fail('artifact-too-large', artifact.key, message));
        }
        const content = await readFile(path, { signal });
        requireSize(artifact, content.length);
        requireDigest(artifact, createHash('sha256').update(content).digest('hex'));
        return content;
      },
      signal,
    );
  }

  fetch(
    artifact: StoredArtifact,
    targetPath: string,
    signal: AbortSignal,
  ): Promise<Result<void, ArtifactError>> {
    return guard(
      artifact.key,
      async () => {
        const temp = join(dirname(targetPath), `.${basename(targetPath)}.${randomUUID()}`);
        await copyToNew(artifact, this.localPath(artifact.key), temp, signal);
        await moveInto(temp, targetPath, () =>
          Promise.reject(
            new Failure(fail('artifact-exists', artifact.key, `${targetPath} exists`)),
          ),
        );
        await syncPath(dirname(targetPath));
      },
      signal,
    );
  }

  verify(artifact: StoredArtifact, signal: AbortSignal): Promise<Result<void, ArtifactError>> {
    return guard(
      artifact.key,
      () => verifyFile(artifact, this.localPath(artifact.key), signal),
      signal,
    );
  }

  async *list(signal: AbortSignal): AsyncIterable<ListedObject> {
    try {
      for await (const entry of await opendir(this.#root)) {
        if (entry.name === TEMP_FOLDER) continue;
        yield* this.#listFolder(entry.name, 0, signal);
      }
    } catch (error) {
      if (error instanceof Failure || signal.aborted) throw error;
      throw new Failure<ArtifactError>(toError(error, this.#root, 'store-io'), error);
    }
  }

  delete(
    key: ArtifactKey,
    fence: Fence,
  ): Promise<Result<'deleted' | 'missing' | 'fenced', ArtifactError>> {
    return guard(key, async () => {
      const path = this.localPath(key);
      if (!(await fence())) return 'fenced';
      try {
        await unlink(path);
        // Who is told so forgets it durably: after a power failure nobody would look for it again.
        await syncPath(dirname(path));
        return 'deleted';
      } catch (error) {
        if (systemCode(error) === 'ENOENT') return await this.#confirmMissing();
        throw error;
      }
    });
  }

  /** A store that is not there at all (an unmounted disk) has lost nothing: it cannot be read. */
  async #confirmMissing(): Promise<'missing'> {
    try {
      await stat(join(this.#root, TEMP_FOLDER));
      return 'missing';
    } catch (error) {
      const message = `the store ${this.#root} is not there: ${(error as Error).message}`;
      throw new Failure<ArtifactError>(fail('store-io', this.#root, message), error);
    }
  }

  async *#listFolder(
    name: string,
    depth: number,
    signal: AbortSignal,
  ): AsyncIterable<ListedObject> {
    signal.throwIfAborted();
    const path = join(this.#root, name);
    const facts = await stat(path);
    if (facts.isDirectory() && depth < 2) {
      for await (const entry of await opendir(path)) {
        yield* this.#listFolder(join(name, entry.name), depth + 1, signal);
      }
      return;
    }
    yield {
      key: this.#keyOf(name),
      name,
      sizeBytes: bytes(facts.size),
      modifiedAtMs: Math.round(facts.mtimeMs),
    };
  }

  /** Null unless the file is exactly where its key puts it. */
  #keyOf(name: string): ArtifactKey | null {
    const kind = artifactKinds.find((known) => name.startsWith(`${known}/`));
    const match = filePattern.exec(basename(name));
    if (kind === undefined || match?.[1] === undefined || match[2] === undefined) return null;
    const key = artifactKey(`${kind}/${match[1]}/${match[2]}`);
    return this.localPath(key) === join(this.#root, name) ? key : null;
  }

  async #copyIn(
    artifact: StoredArtifact,
    sourcePath: string,
    path: string,
    signal: AbortSignal,
  ): Promise<void> {
    const folder = join(this.#root, TEMP_FOLDER);
    const { path: temp, file } = await createUnfinished(folder, this.#node);
    try {
      await copyVerified(artifact, sourcePath, file, signal);
      await moveInto(temp, path, () => requireStored(artifact, path, signal));
    } catch (error) {
      await unlink(temp).catch(() => undefined);
      throw error;
    } finally {
      await file.close();
    }
  }

  /** A folder made here is durable in its parent before anything in it counts as stored. */
  async #makeFolder(path: string): Promise<void> {
    // Without this the store is not mounted, and nothing may be put in its place.
    await stat(join(this.#root, TEMP_FOLDER));
    const made = await mkdir(path, { recursive: true });
    if (made === undefined && this.#madeFolders.has(path)) return;
    await syncPath(dirname(path));
    await syncPath(this.#root);
    this.#madeFolders.add(path);
  }
}

/** False where the filesystem has no way to link these two. */
async function linkSource(
  artifact: StoredArtifact,
  sourcePath: string,
  path: string,
): Promise<boolean> {
  const source = await openSource(artifact, sourcePath);
  try {
    requireSize(artifact, (await source.stat()).size);
    await source.chmod(0o444);
    await source.sync();
    await link(sourcePath, path);
    return true;
  } catch (error) {
    const code = systemCode(error) ?? '';
    if (code === 'EEXIST') {
      await requireStored(artifact, path, new AbortController().signal);
      return true;
    }
    if (unlinkable.has(code)) return false;
    throw error;
  } finally {
    await source.close();
  }
}

async function openSource(artifact: StoredArtifact, path: string): Promise<FileHandle> {
  try {
    return await open(path, 'r');
  } catch (error) {
    if (systemCode(error) !== 'ENOENT') throw error;
    throw new Failure(fail('source-missing', artifact.key, `${path} does not exist`), error);
  }
}

/** The same put again, after a crash or a lost answer, finds its own object. */
async function requireStored(
  artifact: StoredArtifact,
  path: string,
  signal: AbortSignal,
): Promise<void> {
  try {
    await verifyFile(artifact, path, signal);
  } catch (error) {
    if (!(error instanceof Failure) || signal.aborted) throw error;
    const message = `${artifact.key} exists with other bytes`;
    throw new Failure<ArtifactError>(fail('artifact-exists', artifact.key, message), error);
  }
}

/** Leaves a durable, read-only file with the right bytes at `temp`, or nothing. */
async function copyToNew(
  artifact: StoredArtifact,
  sourcePath: string,
  temp: string,
  signal: AbortSignal,
): Promise<void> {
  const target = await open(temp, 'wx', 0o600);
  try {
    await copyVerified(artifact, sourcePath, target, signal);
    await target.close();
  } catch (error) {
    await target.close().catch(() => undefined);
    await unlink(temp).catch(() => undefined);
    throw error;
  }
}

/** Makes `target`, which is empty, a durable, read-only file with the right bytes. */
async function copyVerified(
  artifact: StoredArtifact,
  sourcePath: string,
  target: FileHandle,
  signal: AbortSignal,
): Promise<void> {
  await using source = await openSource(artifact, sourcePath);
  const hex = await pump(source, signal, async (chunk) => {
    for (let from = 0; from < chunk.length;) {
      from += (await target.write(chunk, from)).bytesWritten;
    }
  });
  requireSize(artifact, (await target.stat()).size);
  requireDigest(artifact, hex);
  await target.chmod(0o444);
  await target.sync();
}

/**
 * `link` fails where the name is taken; `rename` would overwrite. Filesystems without links rename.
 */
async function moveInto(temp: string, path: string, taken: () => Promise<void>): Promise<void> {
  try {
    await link(temp, path);
  } catch (error) {
    const code = systemCode(error) ?? '';
    if (unlinkable.has(code) && !(await exists(path))) {
      await rename(temp, path);
      return;
    }
    if (code !== 'EEXIST') {
      await unlink(temp).catch(() => undefined);
      throw error;
    }
    await unlink(temp);
    await taken();
    return;
  }
  await unlink(temp);
}

async function exists(path: string): Promise<boolean> {
  try {
    await stat(path);
    return true;
  } catch (error) {
    if (systemCode(error) === 'ENOENT') return false;
    throw error;
  }
}

async function verifyFile(
  artifact: StoredArtifact,
  path: string,
  signal: AbortSignal,
): Promise<void> {
  await using file = await open(path, 'r');
  requireSize(artifact, (await file.stat()).size);
  requireDigest(artifact, await pump(file, signal));
}

/** Reads to the end in order; returns the sha256 of all of it, in hex. */
async function pump(
  source: FileHandle,
  signal: AbortSignal,
  use?: (chunk: Uint8Array) => Promise<void>,
): Promise<string> {
  const hash = createHash('sha256');
  const buffer = Buffer.allocUnsafe(COPY_CHUNK_BYTES);
  for (;;) {
    signal.throwIfAborted();
    const { bytesRead } = await source.read(buffer, 0, buffer.length, null);
    if (bytesRead === 0) return hash.digest('hex');
    const chunk = buffer.subarray(0, bytesRead);
    hash.update(chunk);
    await use?.(chunk);
  }
}

function requireSize(artifact: StoredArtifact, size: number): void {
  if (size === artifact.sizeBytes) return;
  const message = `${artifact.key} has ${size} bytes, not ${artifact.sizeBytes}`;
  throw new Failure<ArtifactError>(fail('digest-mismatch', artifact.key, message));
}

function requireDigest(artifact: StoredArtifact, hex: string): void {
  assert(isDigest(artifact.digest), 'an artifact has a digest');
  if (`sha256:${hex}` === artifact.digest) return;
  const message = `${artifact.key} has bytes of sha256:${hex}`;
  throw new Failure<ArtifactError>(fail('digest-mismatch', artifact.key, message));
}

/** Makes a new name, or a removal, in the folder durable; or the bytes of a file. */
async function syncPath(path: string): Promise<void> {
  await using handle = await open(path, 'r');
  await handle.sync();
}

const fail = (kind: ArtifactErrorKind, key: string, message: string): ArtifactError => ({
  kind,
  message,
  key,
});

async function guard<T>(
  key: string,
  work: () => Promise<T>,
  signal?: AbortSignal,
  missing: 'artifact-missing' | 'store-io' = 'artifact-missing',
): Promise<Result<T, ArtifactError>> {
  try {
    return ok(await work());
  } catch (error) {
    if (error instanceof Failure) return err(error.detail as ArtifactError);
    if (signal?.aborted === true) return err(fail('cancelled', key, `${key}: cancelled`));
    return err(toError(error, key, missing));
  }
}

/** `missing`: what a name that does not exist means here. */
function toError(
  error: unknown,
  key: string,
  missing: 'artifact-missing' | 'store-io',
): ArtifactError {
  const code = systemCode(error);
  if (code === undefined) throw error;
  const kind =
    code === 'ENOENT'
      ? missing
      : code === 'ENOSPC' || code === 'EDQUOT'
        ? 'store-no-space'
        : 'store-io';
  return { kind, message: `${key}: ${(error as Error).message}`, key, code };
}
