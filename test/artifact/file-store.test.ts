import { createHash, randomBytes } from 'node:crypto';
import {
  chmod,
  mkdtemp,
  open as openFile,
  readFile,
  readdir,
  readlink,
  realpath,
  rm,
  stat,
  symlink,
  writeFile,
} from 'node:fs/promises';
import type { FileHandle } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { afterAll, beforeEach, expect, test, vi } from 'vitest';
import { FileArtifactStore } from '../../src/artifact/file-store.ts';
import { newArtifact } from '../../src/artifact/store.ts';
import type { ArtifactError, ListedObject, StoredArtifact } from '../../src/artifact/store.ts';
import type { Result } from '../../src/result.ts';
import { artifactKey, bytes, digest, nodeId } from '../../src/units.ts';

const signal = new AbortController().signal;
const node = nodeId('test-node');
const yes = () => Promise.resolve(true);
const folders: string[] = [];
let root: string;
let sources: string;

beforeEach(async () => {
  const folder = await mkdtemp(join(tmpdir(), 'varve-store-'));
  folders.push(folder);
  root = join(folder, 'store');
  sources = await mkdtemp(join(folder, 'sources-'));
});
afterAll(() => Promise.all(folders.map((path) => rm(path, { recursive: true, force: true }))));

function value<T>(result: Result<T, ArtifactError>): T {
  if (result.ok) return result.value;
  throw new Error(`${result.error.kind}: ${result.error.message}`);
}
const kindOf = (result: Result<unknown, ArtifactError>): string =>
  result.ok ? 'ok' : result.error.kind;

const open = async (hardLinks: 'auto' | 'never' = 'auto'): Promise<FileArtifactStore> =>
  value(await FileArtifactStore.open({ root, node, hardLinks }));

async function source(size = 3_000_000): Promise<{ artifact: StoredArtifact; sourcePath: string }> {
  const content = randomBytes(size);
  const hex = createHash('sha256').update(content).digest('hex');
  const artifact = newArtifact({
    kind: 'layer',
    digest: digest(`sha256:${hex}`),
    sizeBytes: bytes(size),
  });
  const sourcePath = join(sources, artifact.key.replaceAll('/', '-'));
  await writeFile(sourcePath, content);
  return { artifact, sourcePath };
}

async function listed(store: FileArtifactStore): Promise<ListedObject[]> {
  const all: ListedObject[] = [];
  for await (const object of store.list(signal)) all.push(object);
  return all;
}

for (const hardLinks of ['auto', 'never'] as const) {
  test(`a stored object is read-only and whole (links: ${hardLinks})`, async () => {
    const store = await open(hardLinks);
    const { artifact, sourcePath } = await source();
    value(await store.put({ artifact, sourcePath, signal }));
    const path = store.localPath(artifact.key);
    const facts = await stat(path);
    expect(facts.mode & 0o777).toBe(0o444);
    expect(facts.ino === (await stat(sourcePath)).ino).toBe(hardLinks === 'auto');
    expect((await readFile(path)).equals(await readFile(sourcePath))).toBe(true);
    expect(value(await store.head(artifact.key))).toEqual({ sizeBytes: artifact.sizeBytes });
    value(await store.verify(artifact, signal));
    expect((await listed(store)).map(({ key }) => key)).toEqual([artifact.key]);
    value(await store.put({ artifact, sourcePath, signal }));
    expect(await readdir(join(root, '.incoming'))).toEqual([]);
  });

  test(`other bytes under a taken key are refused (links: ${hardLinks})`, async () => {
    const store = await open(hardLinks);
    const { artifact, sourcePath } = await source();
    const other = await source(artifact.sizeBytes);
    value(await store.put({ artifact, sourcePath, signal }));
    await chmod(store.localPath(artifact.key), 0o644);
    await rm(store.localPath(artifact.key));
    await writeFile(store.localPath(artifact.key), await readFile(other.sourcePath));
    expect(kindOf(await store.put({ artifact, sourcePath, signal }))).toBe('artifact-exists');
    expect(kindOf(await store.verify(artifact, signal))).toBe('digest-mismatch');
  });
}

test('a copy of bytes that are not the digest stores nothing', async () => {
  const store = await open('never');
  const { artifact } = await source();
  const other = await source(artifact.sizeBytes);
  const shorter = await source(artifact.sizeBytes - 1);
  for (const { sourcePath } of [other, shorter]) {
    expect(kindOf(await store.put({ artifact, sourcePath, signal }))).toBe('digest-mismatch');
  }
  const gone = join(sources, 'gone');
  expect(kindOf(await store.put({ artifact, sourcePath: gone, signal }))).toBe('source-missing');
  expect(await listed(store)).toEqual([]);
  expect(await readdir(join(root, '.incoming'))).toEqual([]);
});

test('reads never return bytes of another digest', async () => {
  const store = await open();
  const { artifact, sourcePath } = await source(100_000);
  value(await store.put({ artifact, sourcePath, signal }));
  const read = value(await store.readAll(artifact, bytes(100_000), signal));
  expect((await readFile(sourcePath)).equals(read)).toBe(true);
  expect(kindOf(await store.readAll(artifact, bytes(99_999), signal))).toBe('artifact-too-large');
  const path = store.localPath(artifact.key);
  const flipped = await readFile(path);
  flipped[5000] = (flipped[5000] ?? 0) ^ 1;
  await rm(path);
  await writeFile(path, flipped);
  const target = join(sources, 'fetched');
  expect(kindOf(await store.readAll(artifact, bytes(100_000), signal))).toBe('digest-mismatch');
  expect(kindOf(await store.verify(artifact, signal))).toBe('digest-mismatch');
  expect(kindOf(await store.fetch(artifact, target, signal))).toBe('digest-mismatch');
  await rm(path);
  expect(kindOf(await store.fetch(artifact, target, signal))).toBe('source-missing');
  expect(kindOf(await store.readAll(artifact, bytes(100_000), signal))).toBe('artifact-missing');
  expect(kindOf(await store.head(artifact.key))).toBe('artifact-missing');
  expect((await readdir(sources)).filter((name) => name.includes('fetched'))).toEqual([]);
});

test('a fetched copy appears under its name only when verified', async () => {
  const store = await open();
  const { artifact, sourcePath } = await source();
  value(await store.put({ artifact, sourcePath, signal }));
  const target = join(sources, 'fetched');
  value(await store.fetch(artifact, target, signal));
  expect((await readFile(target)).equals(await readFile(sourcePath))).toBe(true);
  expect(kindOf(await store.fetch(artifact, target, signal))).toBe('artifact-exists');
  expect((await stat(target)).mode & 0o777).toBe(0o444);
});

test('a delete asks its fence first, and a missing object counts as deleted', async () => {
  const store = await open();
  const { artifact, sourcePath } = await source();
  value(await store.put({ artifact, sourcePath, signal }));
  expect(value(await store.delete(artifact.key, () => Promise.resolve(false)))).toBe('fenced');
  value(await store.verify(artifact, signal));
  expect(value(await store.delete(artifact.key, yes))).toBe('deleted');
  expect(value(await store.delete(artifact.key, yes))).toBe('missing');
  await stat(sourcePath);
});

test('a store whose folder has gone is unreadable, not empty', async () => {
  const store = await open();
  const { artifact } = await source();
  await rm(root, { recursive: true });
  expect(kindOf(await store.delete(artifact.key, yes))).toBe('store-io');
  await expect(listed(store)).rejects.toMatchObject({ detail: { kind: 'store-io' } });
});

test('the same store through a symbolic link or another spelling lists the same keys', async () => {
  const { artifact, sourcePath } = await source();
  value(await (await open()).put({ artifact, sourcePath, signal }));
  const alias = join(dirname(root), 'alias');
  await symlink(root, alias);
  for (const spelling of [`${root}/`, alias, join(root, '..', 'store'), `${alias}//.`]) {
    const store = value(await FileArtifactStore.open({ root: spelling, node }));
    expect((await listed(store)).map(({ key }) => key)).toEqual([artifact.key]);
  }
});

test('files that are not where a key puts them are listed without a key', async () => {
  const store = await open();
  const { artifact, sourcePath } = await source();
  value(await store.put({ artifact, sourcePath, signal }));
  const path = store.localPath(artifact.key);
  await writeFile(join(root, 'notes.txt'), 'x');
  await writeFile(join(root, 'layer', path.slice(-101)), 'x');
  const strays = (await listed(store)).filter(({ key }) => key === null);
  expect(strays.map(({ name }) => name).sort()).toEqual(
    [`layer/${path.slice(-101)}`, 'notes.txt'].sort(),
  );
});

test('keys that are none never become paths', async () => {
  const store = await open();
  for (const key of ['../../etc/passwd', 'layer/../x', '', 'layer/00/00', 'layer\0/x']) {
    expect(kindOf(await store.head(artifactKey(key)))).toBe('artifact-key-invalid');
    expect(kindOf(await store.delete(artifactKey(key), yes))).toBe('artifact-key-invalid');
  }
});

test('a cancelled put leaves nothing', async () => {
  const store = await open('never');
  const { artifact, sourcePath } = await source();
  const cancelled = AbortSignal.abort();
  expect(kindOf(await store.put({ artifact, sourcePath, signal: cancelled }))).toBe('cancelled');
  expect(await listed(store)).toEqual([]);
});

test('a delete is on the disk before it is answered: the folder is flushed without the name', async () => {
  const store = await open();
  const { artifact, sourcePath } = await source(1000);
  value(await store.put({ artifact, sourcePath, signal }));
  const path = store.localPath(artifact.key);
  const anyFile = await openFile(sourcePath);
  const prototype = Object.getPrototypeOf(anyFile) as FileHandle;
  await anyFile.close();
  const flushed: { folder: string; names: string[] }[] = [];
  const sync = vi.spyOn(prototype, 'sync').mockImplementation(async function (this: FileHandle) {
    const folder = await readlink(`/proc/self/fd/${this.fd}`);
    flushed.push({ folder, names: await readdir(folder) });
    await this.datasync();
  });
  expect(value(await store.delete(artifact.key, yes))).toBe('deleted');
  sync.mockRestore();
  expect(flushed).toEqual([{ folder: await realpath(dirname(path)), names: [] }]);
});
