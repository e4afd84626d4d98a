/** A restore that is refused, fails or is ended leaves what was there, and nothing of its own. */
import { mkdir, readdir, readFile, stat, writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { untilSignal } from '../../src/cli/signals.ts';
import { materialise } from '../../src/restore/materialise.ts';
import { Failure } from '../../src/result.ts';
import { Harness, never, valueOf } from '../capture/harness.ts';

async function snapshotOf(harness: Harness): Promise<string> {
  await using vm = await harness.vm({ memoryMib: 16, dialect: 'aenv' });
  await vm.run({ pages: { firstPage: 500, pageCount: 300 }, value: 3 });
  const { vmId } = await harness.attach(vm);
  return (await harness.published(vmId)).snapshotId;
}

const kindOf = async (work: Promise<unknown>): Promise<string> => {
  const error: unknown = await work.catch((thrown: unknown) => thrown);
  return error instanceof Failure ? (error as Failure).detail.kind : String(error);
};

test('a second restore into the same folder is refused, and the first stays as it was', async () => {
  await using harness = await Harness.make();
  const snapshot = await snapshotOf(harness);
  const folder = join(harness.folder, 'out');
  const request = { snapshot, folder, signal: never };
  const first = await materialise(harness.restores, request);
  const before = await readFile(first.memoryPath);
  const names = await readdir(folder);
  expect(await kindOf(materialise(harness.restores, request))).toBe('restore-target-exists');
  expect(await readdir(folder)).toEqual(names);
  expect((await readFile(first.memoryPath)).equals(before)).toBe(true);
  for (const path of [first.memoryPath, first.vmStatePath ?? '']) {
    expect((await stat(path)).mode & 0o777).toBe(0o600);
  }
});

test.each(['memory', 'vm-state', 'mem_image.json', 'firecracker-manifest.json'])(
  'a folder that has a file %s of somebody else is refused before anything is written',
  async (name) => {
    await using harness = await Harness.make();
    const snapshot = await snapshotOf(harness);
    const folder = join(harness.folder, 'out');
    await mkdir(folder);
    await writeFile(join(folder, name), 'mine');
    const refused = materialise(harness.restores, { snapshot, folder, signal: never });
    expect(await kindOf(refused)).toBe('restore-target-exists');
    expect(await readdir(folder)).toEqual([name]);
    expect(await readFile(join(folder, name), 'utf8')).toBe('mine');
    expect(valueOf(await harness.catalog.listHolds({}))).toEqual([]);
  },
);

test('a restore that is ended by a signal gives back its hold and removes what it made', async () => {
  await using harness = await Harness.make();
  const snapshot = await snapshotOf(harness);
  const folder = join(harness.folder, 'out');
  await mkdir(folder);
  await writeFile(join(folder, 'other'), 'mine');
  const onProgress = (): void => void process.emit('SIGTERM');
  const ended = untilSignal((signal) =>
    materialise(harness.restores, { snapshot, folder, signal, onProgress }),
  );
  await expect(ended).rejects.toMatchObject({ detail: { kind: 'interrupted', exitCode: 143 } });
  expect(await readdir(folder)).toEqual(['other']);
  expect(valueOf(await harness.catalog.listHolds({}))).toEqual([]);
});
