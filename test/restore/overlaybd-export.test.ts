import { createReadStream } from 'node:fs';
import { mkdtemp, readFile, readdir } from 'node:fs/promises';
import { createHash } from 'node:crypto';
import { dirname, join } from 'node:path';
import { expect, test } from 'vitest';
import { lowerPaths, readImageConfig } from '../../src/layer/image-config.ts';
import { flattenStack } from '../../src/layer/flatten.ts';
import { LayerStack } from '../../src/layer/layer-stack.ts';
import { materialise } from '../../src/restore/materialise.ts';
import { exportOverlaybd } from '../../src/restore/overlaybd-export.ts';
import { Harness, never, valueOf } from '../capture/harness.ts';

async function sha256(path: string): Promise<string> {
  const hash = createHash('sha256');
  for await (const chunk of createReadStream(path) as AsyncIterable<Buffer>) hash.update(chunk);
  return hash.digest('hex');
}

test('the exported image config opens as the stack that the memory file was made of', async () => {
  await using harness = await Harness.make();
  await using vm = await harness.vm({ dialect: 'e2b', memoryMib: 16 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  await vm.run({ pages: { firstPage: 1500, pageCount: 20 }, value: 1 });
  const base = await harness.published(vmId);
  await vm.run({ pages: { firstPage: 1510, pageCount: 20 }, value: 2 });
  const { snapshotId, layer } = await harness.published(vmId);
  const folder = await mkdtemp(join(harness.folder, 'export-'));
  const { memoryPath } = await materialise(harness.restores, {
    snapshot: snapshotId,
    folder,
    signal: never,
  });

  const configPath = join(dirname(memoryPath), 'mem_image.json');
  const config = valueOf(await readImageConfig(configPath));
  expect(config.lowers.map((lower) => lower.uuid)).toEqual([base.layer, layer]);
  // As the reference opens them: whatever its own working directory is.
  for (const lower of config.lowers) expect(lower.file).toMatch(/^\//);
  await using stack = valueOf(await LayerStack.open(lowerPaths(config, configPath)));
  const path = join(folder, 'again');
  valueOf(await flattenStack(stack, { path, signal: never, onProgress: undefined }));
  expect(await sha256(path)).toBe(await sha256(memoryPath));
  const manifest: unknown = JSON.parse(
    await readFile(join(folder, 'firecracker-manifest.json'), 'utf8'),
  );
  expect(manifest).toMatchObject({ version: 1, memory: { virtualSize: 16 * 1024 * 1024 } });

  const elsewhere = await mkdtemp(join(harness.folder, 'remote-'));
  const chain = valueOf(await harness.catalog.lineage(layer));
  const remote = { localPath: () => null };
  const made = (path: string): void => expect.fail(path);
  expect(await exportOverlaybd(remote, chain, elsewhere, made)).toEqual({ ok: true, value: false });
  expect(await readdir(elsewhere)).toEqual([]);
});
