import { readdirSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { openCatalog } from '../../src/catalog/open.ts';
import { launchMiniVm } from '../../src/minivm/launch.ts';
import { nodeId } from '../../src/units.ts';
import { mustOk, temporaryFolder } from './fixtures.ts';
import { Daemon } from './served.ts';

/** Objects in the store's folder; its own files for puts under way are none. */
const objectsIn = (root: string): string[] =>
  readdirSync(root, { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile() && !entry.parentPath.includes('.incoming'))
    .map((entry) => entry.name);

test('what a daemon was storing when it was killed is given up when it is back, and collected', async () => {
  const folder = temporaryFolder();
  const socketPath = join(folder, 'vm.sock');
  await using vm = await launchMiniVm({
    id: 'vm',
    dialect: 'e2b',
    memoryMib: 32,
    socketPath,
  });
  const retries = '[pipeline.publish]\nretry_min = "10ms"\nretry_max = "100ms"\n';
  await using daemon = new Daemon(folder, retries);
  await daemon.start();
  await daemon.attach({ socketPath, trackingMode: 'dirty' });
  await vm.run({ pages: { firstPage: 2000, pageCount: 100 }, value: 1 });
  // Layers are stored; then the store has no place for VM states.
  const artifacts = join(folder, 'state/artifacts');
  writeFileSync(join(artifacts, 'vm-state'), 'in the way');
  const { captureId } = await daemon.startCapture('vm', { resumeAfter: 'commit' });
  while ((await daemon.show(captureId)).failure === null);
  expect(await daemon.show(captureId)).toMatchObject({
    status: 'committed',
    failure: { kind: 'store-io' },
  });
  await daemon.kill();

  const catalog = mustOk(await openCatalog({ url: `sqlite:${join(folder, 'state/catalog.db')}` }));
  const node = nodeId('test');
  const left = mustOk(await catalog.listUploads(node));
  expect(left.map(({ kind }) => kind).sort()).toEqual(['layer', 'vm-state']);
  expect(objectsIn(join(artifacts, 'layer'))).toHaveLength(1);
  rmSync(join(artifacts, 'vm-state'));

  await daemon.start();
  while ((await daemon.show(captureId)).status !== 'published');
  expect(mustOk(await catalog.listUploads(node))).toEqual([]);
  expect(objectsIn(artifacts)).toHaveLength(4);
  const run = await daemon.send('POST', '/v1/gc/runs', {});
  expect(run).toMatchObject({ body: { objectsReclaimed: 2 } });
  expect(objectsIn(artifacts)).toHaveLength(3);
  await catalog.close();
});
