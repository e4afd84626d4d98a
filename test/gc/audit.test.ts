import { chmod, mkdir, readFile, rm, writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { newArtifact } from '../../src/artifact/store.ts';
import { FileArtifactStore } from '../../src/artifact/file-store.ts';
import { Audit } from '../../src/gc/audit.ts';
import type { AuditOptions, Finding, LayerHeader } from '../../src/gc/audit.ts';
import type { ArtifactKey } from '../../src/units.ts';
import { bytes } from '../../src/units.ts';
import { NODE, onEachDialect, upload, uuid, value } from '../catalog/catalogs.ts';
import { World, signal } from './world.ts';

onEachDialect('fsck', (dialect) => {
  async function audit(
    world: World,
    options: Partial<AuditOptions> = {},
    header: LayerHeader | string | null = null,
  ): Promise<readonly Finding[]> {
    const deps = {
      database: world.catalog.database,
      store: world.store,
      readHeader: () => Promise.resolve(header),
    };
    const all = { bytes: false, repair: false, ...options };
    return (await new Audit(deps, all).run(signal)).findings;
  }
  const kinds = (findings: readonly Finding[]): string[] => findings.map(({ kind }) => kind).sort();
  const pathOf = (world: World, key: ArtifactKey): string => world.store.localPath(key) ?? '';

  test('a whole catalog with captures under way has nothing to report', async () => {
    await using world = await World.open(dialect);
    await world.publish({ layers: 2 });
    await world.prepare();
    const gone = await world.publish();
    value(await world.catalog.retire(gone.snapshotId));
    expect(await audit(world, { bytes: true })).toEqual([]);
    await world.collect();
    expect(await audit(world, { bytes: true })).toEqual([]);
  });

  test('missing, short, flipped and misplaced objects are named', async () => {
    await using world = await World.open(dialect);
    const { manifest, layers, artifacts } = await world.publish({ layers: 2 });
    const [low, top] = layers;
    const state = artifacts[0]?.artifact;
    if (low === undefined || top === undefined || state === undefined) throw new Error('shape');
    await rm(pathOf(world, manifest.key));
    const flipped = await readFile(pathOf(world, low.artifact.key));
    flipped[3] = (flipped[3] ?? 0) ^ 1;
    await chmod(pathOf(world, low.artifact.key), 0o644);
    await writeFile(pathOf(world, low.artifact.key), flipped);
    await chmod(pathOf(world, state.key), 0o644);
    await writeFile(pathOf(world, state.key), 'short');
    await mkdir(join(world.root, 'layer', 'zz'), { recursive: true });
    await writeFile(join(world.root, 'layer', 'zz', 'README'), 'x');
    const quick = await audit(world);
    expect(kinds(quick)).toEqual(['corrupt', 'dangling', 'misplaced']);
    const full = await audit(world, { bytes: true });
    expect(kinds(full)).toEqual(['corrupt', 'corrupt', 'dangling', 'misplaced']);
    expect(full.map(({ subject }) => subject).sort()).toEqual(
      [manifest.key, low.artifact.key, state.key, 'layer/zz/README'].sort(),
    );
  });

  test('layer headers that say something else are named', async () => {
    await using world = await World.open(dialect);
    const { layers } = await world.publish();
    const [layer] = layers;
    if (layer === undefined) throw new Error('no layer');
    const right = { uuid: layer.uuid, parentUuid: null, virtualBytes: layer.virtualBytes };
    expect(await audit(world, {}, right)).toEqual([]);
    expect(kinds(await audit(world, {}, { ...right, uuid: uuid() }))).toEqual(['misplaced']);
    expect(kinds(await audit(world, {}, { ...right, parentUuid: uuid() }))).toEqual(['misplaced']);
    expect(kinds(await audit(world, {}, { ...right, virtualBytes: bytes(1) }))).toEqual([
      'corrupt',
    ]);
    expect(kinds(await audit(world, {}, 'not a layer'))).toEqual(['corrupt']);
  });

  test('repair queues leaks, and nothing else', async () => {
    await using world = await World.open(dialect);
    const kept = await world.publish();
    const lost = await world.publish();
    await rm(pathOf(world, kept.manifest.key));
    // As if a transaction had forgotten to queue what it left without a claim.
    await world.catalog.database.write('test', (tx) =>
      tx.db
        .updateTable('snapshot')
        .set({ content_id: null, retired_at_ms: 1 })
        .where('id', '=', lost.snapshotId)
        .execute(),
    );
    const orphan = newArtifact(upload('layer', 1));
    await mkdir(join(pathOf(world, orphan.key), '..'), { recursive: true });
    await writeFile(pathOf(world, orphan.key), 'x');
    expect(kinds(await audit(world))).toEqual(['dangling', 'leaked', 'leaked']);
    const repaired = await audit(world, { repair: true });
    expect(repaired.filter(({ repaired: done }) => done).map(({ kind }) => kind)).toEqual([
      'leaked',
      'leaked',
    ]);
    const report = await world.collect();
    expect(report).toMatchObject({ contentsDeleted: 1, layersCondemned: 1, objectsReclaimed: 4 });
    expect(kinds(await audit(world))).toEqual(['dangling']);
  });

  test('a store opened through another spelling of its path has nothing to report', async () => {
    await using world = await World.open(dialect);
    await world.publish({ layers: 3 });
    const store = value(
      await FileArtifactStore.open({ root: `${world.root}/../store/`, node: NODE }),
    );
    const deps = {
      database: world.catalog.database,
      store,
      readHeader: () => Promise.resolve(null),
    };
    const { findings } = await new Audit(deps, { bytes: true, repair: false }).run(signal);
    expect(findings).toEqual([]);
  });
});
