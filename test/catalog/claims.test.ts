import { beforeAll, expect, test } from 'vitest';
import type { HoldRequest } from '../../src/catalog/catalog.ts';
import type { OpenCatalog } from '../../src/catalog/open.ts';
import { contentId, holdId, nodeId } from '../../src/units.ts';
import {
  NODE,
  errorKind,
  onEachDialect,
  openTest,
  prepare,
  publishOne,
  upload,
  value,
} from './catalogs.ts';

onEachDialect('claims', (dialect) => {
  let catalog: OpenCatalog;
  beforeAll(async () => {
    catalog = await openTest(dialect);
    value(await catalog.registerNode({ nodeId: NODE }));
    return () => catalog.close();
  });

  const holdOf = (id: string, target: HoldRequest['target']): HoldRequest => ({
    holdId: holdId(id),
    nodeId: NODE,
    target,
    purpose: 'prepared',
  });

  test('a hold is taken once, by snapshot or content, and released once', async () => {
    const { snapshotId, contentId: id } = await publishOne(catalog, { alias: 'held' });
    const taken = value(await catalog.hold(holdOf('h1', { snapshot: 'held' })));
    expect(taken).toMatchObject({ contentId: id, nodeId: NODE, releasedAtMs: null });
    expect(value(await catalog.hold(holdOf('h1', { snapshot: snapshotId })))).toEqual(taken);
    value(await catalog.hold(holdOf('h2', { content: id })));
    const other = await publishOne(catalog);
    expect(errorKind(await catalog.hold(holdOf('h1', { content: other.contentId })))).toBe(
      'hold-conflict',
    );
    value(await catalog.release(holdId('h1')));
    value(await catalog.release(holdId('h1')));
    expect(errorKind(await catalog.hold(holdOf('h1', { content: id })))).toBe('hold-released');
    const open = value(await catalog.listHolds({ contentId: id }));
    expect(open.map((hold) => hold.id)).toEqual(['h2']);
    const closed = value(await catalog.listHolds({ contentId: id, closed: true }));
    expect(closed.map((hold) => hold.id)).toEqual(['h1']);
  });

  test('a retired snapshot is refused to new holders, its content is not to old ones', async () => {
    const { snapshotId, contentId: id } = await publishOne(catalog);
    value(await catalog.hold(holdOf('r1', { snapshot: snapshotId })));
    value(await catalog.retire(snapshotId));
    expect(errorKind(await catalog.hold(holdOf('r2', { snapshot: snapshotId })))).toBe(
      'snapshot-retired',
    );
    value(await catalog.hold(holdOf('r3', { content: id })));
    const gone = contentId('nowhere');
    expect(errorKind(await catalog.hold(holdOf('r4', { content: gone })))).toBe('content-missing');
    expect(errorKind(await catalog.hold(holdOf('r4', { snapshot: 'nowhere' })))).toBe(
      'snapshot-missing',
    );
  });

  test('releasing a hold that was never taken spends its id', async () => {
    const { contentId: id } = await publishOne(catalog);
    value(await catalog.release(holdId('late')));
    expect(errorKind(await catalog.hold(holdOf('late', { content: id })))).toBe('hold-released');
  });

  test('releasing some holds leaves those of others', async () => {
    const { contentId: id } = await publishOne(catalog);
    for (const name of ['a1', 'a2', 'b1']) value(await catalog.hold(holdOf(name, { content: id })));
    value(await catalog.releaseMany([holdId('a1'), holdId('a2'), holdId('unknown')]));
    const open = value(await catalog.listHolds({ contentId: id }));
    expect(open.map((hold) => hold.id)).toEqual(['b1']);
  });

  test('a volume switches only from the version its caller saw', async () => {
    const one = await publishOne(catalog);
    const two = await publishOne(catalog);
    const created = value(await catalog.createVolume({ id: 'vol', contentId: one.contentId }));
    expect(created.version).toBe(1);
    expect(value(await catalog.createVolume({ id: 'vol', contentId: one.contentId }))).toEqual(
      created,
    );
    expect(errorKind(await catalog.createVolume({ id: 'vol', contentId: two.contentId }))).toBe(
      'volume-conflict',
    );
    const request = { id: 'vol', version: 1, contentId: two.contentId };
    expect(value(await catalog.switchVolume(request)).version).toBe(2);
    expect(value(await catalog.switchVolume(request)).version).toBe(2);
    const stale = { id: 'vol', version: 1, contentId: one.contentId };
    expect(errorKind(await catalog.switchVolume(stale))).toBe('volume-moved');
    const nowhere = { id: 'vol', version: 2, contentId: contentId('nowhere') };
    expect(errorKind(await catalog.switchVolume(nowhere))).toBe('content-missing');
    expect(value(await catalog.findVolume('vol')).contentId).toBe(two.contentId);
    value(await catalog.deleteVolume('vol'));
    value(await catalog.deleteVolume('vol'));
    expect(errorKind(await catalog.findVolume('vol'))).toBe('volume-missing');
  });

  test('a forgotten node loses its holds and uploads, and its id is spent', async () => {
    const dead = nodeId('dead-node');
    value(await catalog.registerNode({ nodeId: dead, address: '10.0.0.7:7070' }));
    const { contentId: id } = await publishOne(catalog, { node: dead });
    value(await catalog.hold({ ...holdOf('d1', { content: id }), nodeId: dead }));
    value(await catalog.hold(holdOf('alive', { content: id })));
    const started = await prepare(catalog, { node: dead });
    const forgotten = value(await catalog.forgetNode(dead));
    expect(forgotten).toMatchObject({ holdsReleased: 1, uploadsReclaimed: 3 });
    expect(value(await catalog.forgetNode(dead))).toMatchObject({ holdsReleased: 0 });
    const open = value(await catalog.listHolds({ contentId: id }));
    expect(open.map((hold) => hold.id)).toEqual(['alive']);
    expect(errorKind(await catalog.publish(started))).toBe('node-forgotten');
    expect(errorKind(await catalog.publish({ ...started, nodeId: NODE }))).toBe('upload-missing');
    expect(errorKind(await catalog.registerNode({ nodeId: dead }))).toBe('node-forgotten');
    const late = { nodeId: dead, artifacts: [upload()] };
    expect(errorKind(await catalog.recordUpload(late))).toBe('node-forgotten');
    const unknown = nodeId('nobody');
    expect(errorKind(await catalog.forgetNode(unknown))).toBe('node-unknown');
    expect(errorKind(await catalog.recordUpload({ ...late, nodeId: unknown }))).toBe(
      'node-unknown',
    );
    const nodes = value(await catalog.listNodes());
    expect(nodes.find((node) => node.id === dead)?.forgottenAtMs).not.toBeNull();
  });

  test('a node that is back keeps the uploads it names and gives up the rest', async () => {
    const own = nodeId('own');
    value(await catalog.registerNode({ nodeId: own }));
    const kept = await prepare(catalog, { node: own });
    await prepare(catalog, { node: own });
    const keys = [kept.manifest, ...kept.layers, ...kept.artifacts].map((item) =>
      'artifact' in item ? item.artifact.key : item.key,
    );
    expect(value(await catalog.abandonUploads(own, keys))).toBe(3);
    value(await catalog.publish(kept));
    expect(value(await catalog.listUploads(own))).toEqual([]);
  });

  test('copies of what somebody else has published meanwhile are queued for reclaim', async () => {
    const base = await publishOne(catalog);
    const [layer] = base.layers;
    if (layer === undefined) throw new Error('no layer');
    const [copy] = value(await catalog.recordUpload({ nodeId: NODE, artifacts: [layer.artifact] }));
    if (copy === undefined) throw new Error('no upload');
    const request = await prepare(catalog, { on: layer.uuid });
    const layers = [{ ...layer, artifact: copy }, ...request.layers];
    value(await catalog.publish({ ...request, layers }));
    const queued = await catalog.database.read('test', (tx) =>
      tx.db.selectFrom('reclaim').select('artifact_key').execute(),
    );
    expect(queued.map((row) => row.artifact_key)).toContain(copy.key);
    const [found] = value(await catalog.findLayers([layer.uuid]));
    expect(found?.artifact.key).toBe(layer.artifact.key);
  });
});
