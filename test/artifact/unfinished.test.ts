/** Unfinished objects of a store that several processes put into. */
import { spawn } from 'node:child_process';
import { createHash, randomBytes } from 'node:crypto';
import { once } from 'node:events';
import { openSync, readlinkSync, unlinkSync } from 'node:fs';
import {
  mkdir,
  mkdtemp,
  open as openFile,
  readdir,
  rename,
  rm,
  stat,
  utimes,
  writeFile,
} from 'node:fs/promises';
import type { FileHandle } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import { FileArtifactStore } from '../../src/artifact/file-store.ts';
import { newArtifact } from '../../src/artifact/store.ts';
import type { ArtifactError, StoredArtifact } from '../../src/artifact/store.ts';
import { createUnfinished, removeUnfinished } from '../../src/artifact/unfinished.ts';
import { tryLock } from '../../src/native/files.ts';
import type { Result } from '../../src/result.ts';
import { bytes, digest, nodeId } from '../../src/units.ts';

/** Called once, with a file that is about to be locked. */
const beforeLock = vi.hoisted(() => ({ work: undefined as ((fd: number) => void) | undefined }));
vi.mock('../../src/native/files.ts', async (original) => {
  const real = await original<{ tryLock: typeof tryLock }>();
  return {
    tryLock: (...[fd, how]: Parameters<typeof tryLock>) => {
      beforeLock.work?.(fd);
      return real.tryLock(fd, how);
    },
  };
});

const DAY_MS = 24 * 60 * 60 * 1000;
const signal = new AbortController().signal;
const node = nodeId('node-a');
const dist = new URL('../../dist/', import.meta.url).href;
let folder: string;
let root: string;

beforeEach(async () => {
  folder = await mkdtemp(join(tmpdir(), 'varve-unfinished-'));
  root = join(folder, 'store');
});
afterEach(() => rm(folder, { recursive: true, force: true }));

function value<T>(result: Result<T, ArtifactError>): T {
  if (result.ok) return result.value;
  throw new Error(`${result.error.kind}: ${result.error.message}`);
}

const incoming = (): Promise<string[]> => readdir(join(root, '.incoming'));

async function source(): Promise<{ artifact: StoredArtifact; sourcePath: string }> {
  const content = randomBytes(100_000);
  const hex = createHash('sha256').update(content).digest('hex');
  const facts = { digest: digest(`sha256:${hex}`), sizeBytes: bytes(content.length) };
  const artifact = newArtifact({ kind: 'layer', ...facts });
  const sourcePath = join(folder, artifact.key.replaceAll('/', '-'));
  await writeFile(sourcePath, content);
  return { artifact, sourcePath };
}

/** Opens the store in a process that sees none of ours: another PID namespace. */
async function openElsewhere(name: string): Promise<void> {
  const script = `
    const { FileArtifactStore } = await import('${dist}src/artifact/file-store.js');
    const [root, node] = process.argv.slice(1);
    const opened = await FileArtifactStore.open({ root, node });
    if (!opened.ok) throw new Error(opened.error.message);
  `;
  const user = process.getuid?.() === 0 ? [] : ['--user', '--map-root-user'];
  const program = [process.execPath, '--input-type=module', '-e', script, root, name];
  const child = spawn('unshare', [...user, '--pid', '--fork', ...program], { stdio: 'inherit' });
  expect(await once(child, 'exit')).toEqual([0, null]);
}

/** Calls `meanwhile` once, between the first bytes of a copy and what follows. */
async function duringWrite(meanwhile: () => Promise<void>): Promise<void> {
  const anyFile = await openFile(root);
  const prototype = Object.getPrototypeOf(anyFile) as FileHandle;
  await anyFile.close();
  // eslint-disable-next-line @typescript-eslint/unbound-method -- called with its handle below
  const real = prototype.write as (this: FileHandle, ...call: unknown[]) => Promise<unknown>;
  const spy = vi.spyOn(prototype, 'write');
  spy.mockImplementation(async function (this: FileHandle, ...call: unknown[]) {
    const written = await real.apply(this, call);
    spy.mockRestore();
    await meanwhile();
    return written as Awaited<ReturnType<FileHandle['write']>>;
  });
}

test.each([['node-a'], ['node-b']])(
  'a put goes on while %s opens the store in another PID namespace',
  async (other) => {
    const store = value(await FileArtifactStore.open({ root, node, hardLinks: 'never' }));
    const { artifact, sourcePath } = await source();
    await duringWrite(async () => {
      await openElsewhere(other);
      expect(await incoming()).toHaveLength(1);
    });
    value(await store.put({ artifact, sourcePath, signal }));
    value(await store.verify(artifact, signal));
    expect(await incoming()).toEqual([]);
  },
);

async function leftover(of: string): Promise<string> {
  await mkdir(join(root, '.incoming'), { recursive: true });
  const { path, file } = await createUnfinished(join(root, '.incoming'), nodeId(of));
  await file.close();
  return path.slice(join(root, '.incoming', '/').length);
}

test('what a dead process left is removed by its own node, and by others when it is a week old', async () => {
  const own = await leftover('node-a');
  const others = await leftover('node-b');
  const unnamed = '4194303.0f8fad5b-d9cb-469f-a165-70867728950e';
  await writeFile(join(root, '.incoming', unnamed), 'x');
  expect(await incoming()).toEqual([unnamed, own, others].sort());
  value(await FileArtifactStore.open({ root, node }));
  expect(await incoming()).toEqual([unnamed, others].sort());
  const old = (Date.now() - 8 * DAY_MS) / 1000;
  for (const name of await incoming()) await utimes(join(root, '.incoming', name), old, old);
  value(await FileArtifactStore.open({ root, node }));
  expect(await incoming()).toEqual([]);
});

test('an unfinished file that is locked stays, however old it is', async () => {
  await mkdir(join(root, '.incoming'), { recursive: true });
  const { path, file } = await createUnfinished(join(root, '.incoming'), nodeId('node-b'));
  const old = (Date.now() - 80 * DAY_MS) / 1000;
  await utimes(path, old, old);
  const store = value(await FileArtifactStore.open({ root, node }));
  expect(value(await store.forgetNode(nodeId('node-b')))).toBe(0);
  expect(await incoming()).toHaveLength(1);
  await file.close();
  value(await FileArtifactStore.open({ root, node }));
  expect(await incoming()).toEqual([]);
});

test('the unfinished files of a node that will not be back are removed when it is forgotten', async () => {
  await leftover('node-b');
  const kept = await leftover('node-b.c');
  const store = value(await FileArtifactStore.open({ root, node }));
  expect(value(await store.forgetNode(nodeId('node-b')))).toBe(1);
  expect(await incoming()).toEqual([kept]);
});

/** Until the process ends. */
function lockShared(path: string): void {
  tryLock(openSync(path, 'r'), 'shared');
}

test.each([
  ['removes the file', unlinkSync],
  ['is about to', lockShared],
])('who cleans up and %s before it is locked takes nothing from its maker', async (_, clean) => {
  const place = join(root, '.incoming');
  await mkdir(place, { recursive: true });
  beforeLock.work = (fd) => {
    beforeLock.work = undefined;
    clean(readlinkSync(`/proc/self/fd/${fd}`));
  };
  const { path, file } = await createUnfinished(place, node);
  await removeUnfinished(place, node, Date.now());
  expect((await stat(path)).ino).toBe((await file.stat()).ino);
  expect(await incoming()).toHaveLength(1);
  await file.close();
});

test('a put into a store that is not mounted is tried again, and puts nothing in its place', async () => {
  const store = value(await FileArtifactStore.open({ root, node }));
  const { artifact, sourcePath } = await source();
  await rename(root, `${root}-away`);
  await mkdir(root);
  const refused = await store.put({ artifact, sourcePath, signal });
  expect(refused).toMatchObject({ ok: false, error: { kind: 'store-io', code: 'ENOENT' } });
  expect(await readdir(root)).toEqual([]);
  await rm(root, { recursive: true });
  await rename(`${root}-away`, root);
  value(await store.put({ artifact, sourcePath, signal }));
  value(await store.verify(artifact, signal));
});
