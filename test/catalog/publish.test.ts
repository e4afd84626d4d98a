import { beforeAll, expect, test } from 'vitest';
import type { OpenCatalog } from '../../src/catalog/open.ts';
import { bytes, holdId } from '../../src/units.ts';
import {
  NODE,
  errorKind,
  headOf,
  onEachDialect,
  openTest,
  prepare,
  publishOne,
  someDigest,
  stray,
  uuid,
  value,
} from './catalogs.ts';

onEachDialect('publish', (dialect) => {
  let catalog: OpenCatalog;
  beforeAll(async () => {
    catalog = await openTest(dialect);
    value(await catalog.registerNode({ nodeId: NODE }));
    return () => catalog.close();
  });

  test('a published snapshot resolves by id and by alias', async () => {
    const base = await publishOne(catalog, { layers: 2 });
    const request = await publishOne(catalog, { layers: 2, on: headOf(base), alias: 'base-image' });
    for (const name of [request.snapshotId, 'base-image']) {
      const { snapshot, content } = value(await catalog.resolve(name));
      expect(snapshot).toMatchObject({ id: request.snapshotId, state: 'active' });
      expect(snapshot.aliases).toEqual(['base-image']);
      expect(content.manifest).toEqual(request.manifest);
      expect(content.heads).toEqual(request.heads);
      expect(content.artifacts).toEqual(request.artifacts);
    }
    const chain = value(await catalog.lineage(headOf(request)));
    expect(chain.map(({ uuid: id }) => id)).toEqual(
      [...base.layers, ...request.layers].map(({ uuid: id }) => id),
    );
    expect(chain.map(({ depth }) => depth)).toEqual([1, 2, 3, 4]);
    expect(value(await catalog.listUploads(NODE))).toEqual([]);
  });

  test('publishing the same again returns the same and adds nothing', async () => {
    const request = await publishOne(catalog, { alias: 'again' });
    const again = value(await catalog.publish(request));
    expect(again.created).toBe(false);
    expect(again.snapshot.aliases).toEqual(['again']);
    expect(value(await catalog.lineage(headOf(request)))).toHaveLength(1);
  });

  test('the same snapshot id with other content is refused', async () => {
    const request = await publishOne(catalog);
    const other = await prepare(catalog);
    const mixed = { ...other, snapshotId: request.snapshotId };
    expect(errorKind(await catalog.publish(mixed))).toBe('snapshot-conflict');
    expect(errorKind(await catalog.publish({ ...other, contentId: request.contentId }))).toBe(
      'content-conflict',
    );
    value(await catalog.publish(other));
  });

  test('a known layer with another predecessor, size or digest is refused', async () => {
    const base = await publishOne(catalog);
    const request = await prepare(catalog, { layers: 2, on: headOf(base) });
    const [low, top] = request.layers;
    if (low === undefined || top === undefined) throw new Error('two layers');
    value(await catalog.publish({ ...request, layers: [low, top] }));
    const next = await prepare(catalog, { layers: 1, on: top.uuid });
    const [own] = next.layers;
    if (own === undefined) throw new Error('one layer');
    const otherDigest = { ...stray(), digest: someDigest() };
    for (const wrong of [
      { ...low, predecessor: null },
      { ...low, virtualBytes: bytes(4096) },
      { ...low, artifact: stray() },
      { ...low, artifact: { ...low.artifact, sizeBytes: bytes(1) } },
    ]) {
      const result = await catalog.publish({ ...next, layers: [wrong, top, own] });
      expect(errorKind(result)).toBe('layer-conflict');
    }
    const broken = { ...low, artifact: otherDigest };
    expect(errorKind(await catalog.publish({ ...next, layers: [broken, top, own] }))).toBe(
      'request-invalid',
    );
    value(await catalog.publish({ ...next, layers: [low, top, own] }));
  });

  test('a layer whose predecessor is not in the catalog is refused, unwritten', async () => {
    const request = await prepare(catalog, { on: uuid() });
    expect(errorKind(await catalog.publish(request))).toBe('layer-missing');
    const headless = await prepare(catalog, { layers: 0 });
    const heads = [{ role: 'memory', layer: uuid() }];
    expect(errorKind(await catalog.publish({ ...headless, heads }))).toBe('layer-missing');
    expect(errorKind(await catalog.show(request.snapshotId))).toBe('snapshot-missing');
    expect(value(await catalog.findLayers(request.layers.map((layer) => layer.uuid)))).toEqual([]);
    expect(value(await catalog.listUploads(NODE))).not.toEqual([]);
    value(await catalog.abandonUploads(NODE, []));
    expect(errorKind(await catalog.publish(headless))).toBe('upload-missing');
  });

  test('a chain of 255 layers is published and one of 256 refused', async () => {
    const deep = await publishOne(catalog, { layers: 255 });
    expect(value(await catalog.lineage(headOf(deep)))).toHaveLength(255);
    const deeper = await prepare(catalog, { on: headOf(deep) });
    expect(errorKind(await catalog.publish(deeper))).toBe('chain-too-deep');
  });

  test('an alias names one snapshot for good', async () => {
    const first = await publishOne(catalog, { alias: 'stable' });
    const second = await prepare(catalog, { alias: 'stable' });
    expect(errorKind(await catalog.publish(second))).toBe('alias-taken');
    value(await catalog.retire('stable'));
    expect(errorKind(await catalog.publish(second))).toBe('alias-taken');
    expect(errorKind(await catalog.resolve('stable'))).toBe('snapshot-retired');
    expect(value(await catalog.show('stable')).id).toBe(first.snapshotId);
    value(await catalog.publish({ ...second, alias: 'other' }));
    expect(errorKind(await catalog.addAlias('other', first.snapshotId))).toBe('alias-taken');
    expect(errorKind(await catalog.addAlias('third', first.snapshotId))).toBe('snapshot-retired');
    value(await catalog.addAlias('third', second.snapshotId));
    value(await catalog.addAlias('third', second.snapshotId));
  });

  test('a publish takes the hold that it is asked for, once, and says so', async () => {
    const hold = { holdId: holdId('of-publish'), purpose: 'prepared' };
    const request = { ...(await prepare(catalog)), hold };
    expect(value(await catalog.publish(request))).toMatchObject({ created: true, held: true });
    const open = value(await catalog.listHolds({ contentId: request.contentId }));
    expect(open).toMatchObject([{ id: hold.holdId, nodeId: NODE, purpose: 'prepared' }]);
    expect(value(await catalog.publish(request))).toMatchObject({ created: false, held: false });
    value(await catalog.release(hold.holdId));
    // A retry whose answer was lost does not take it again.
    expect(value(await catalog.publish(request))).toMatchObject({ created: false, held: false });
    expect(value(await catalog.listHolds({ contentId: request.contentId }))).toEqual([]);
  });

  test('a hold that was released before its publish is left spent, and the snapshot published', async () => {
    const hold = { holdId: holdId('spent'), purpose: 'prepared' };
    value(await catalog.release(hold.holdId));
    const request = { ...(await prepare(catalog)), hold };
    expect(value(await catalog.publish(request))).toMatchObject({ created: true, held: false });
    expect(value(await catalog.listHolds({ contentId: request.contentId }))).toEqual([]);
    value(await catalog.resolve(request.snapshotId));
  });

  test('a hold id that is in use is refused, and nothing is published', async () => {
    const { snapshotId: target } = await publishOne(catalog);
    const taken = { holdId: holdId('in-use'), purpose: 'vm' };
    value(await catalog.hold({ ...taken, nodeId: NODE, target: { snapshot: target } }));
    const request = { ...(await prepare(catalog)), hold: taken };
    expect(errorKind(await catalog.publish(request))).toBe('hold-conflict');
    expect(errorKind(await catalog.show(request.snapshotId))).toBe('snapshot-missing');
    value(await catalog.publish({ ...request, hold: undefined }));
    const bad = { ...(await prepare(catalog)), hold: { holdId: holdId('../x'), purpose: 'vm' } };
    expect(errorKind(await catalog.publish(bad))).toBe('request-invalid');
  });

  test('a publish and the release of its hold at once leave no open hold', async () => {
    for (let round = 0; round < 8; round += 1) {
      const hold = { holdId: holdId(`race-${round}`), purpose: 'prepared' };
      const request = { ...(await prepare(catalog)), hold };
      const both = await Promise.all([catalog.publish(request), catalog.release(hold.holdId)]);
      for (const each of both) expect(each.ok).toBe(true);
      expect(value(await catalog.listHolds({ contentId: request.contentId }))).toEqual([]);
      value(await catalog.resolve(request.snapshotId));
    }
  });

  test('a snapshot marked invalid is refused with the reason until the mark is gone', async () => {
    const { snapshotId } = await publishOne(catalog);
    value(await catalog.setInvalid(snapshotId, 'guest clock is broken'));
    const refused = await catalog.resolve(snapshotId);
    expect(errorKind(refused)).toBe('snapshot-invalid');
    expect(!refused.ok && refused.error.message).toContain('guest clock is broken');
    value(await catalog.setInvalid(snapshotId, null));
    value(await catalog.resolve(snapshotId));
  });

  test('pages list every snapshot once, newest first, with filters', async () => {
    const times = [5, 3, 3, 3, 9, 1, 7];
    const made = [];
    for (const createdAtMs of times) {
      made.push(await publishOne(catalog, { createdAtMs, sourceVm: 'vm-list' }));
    }
    const seen: string[] = [];
    let cursor: string | undefined;
    do {
      const page = value(await catalog.list({ cursor, limit: 2, sourceVm: 'vm-list' }));
      seen.push(...page.snapshots.map(({ id }) => id));
      cursor = page.nextCursor ?? undefined;
    } while (cursor !== undefined);
    const expected = [...made].sort(
      (a, b) => b.createdAtMs - a.createdAtMs || (a.snapshotId < b.snapshotId ? 1 : -1),
    );
    expect(seen).toEqual(expected.map(({ snapshotId }) => snapshotId));
    const some = value(
      await catalog.list({ sourceVm: 'vm-list', createdFromMs: 3, createdBeforeMs: 7 }),
    );
    expect(some.snapshots.map(({ createdAtMs }) => createdAtMs)).toEqual([5, 3, 3, 3]);
    value(await catalog.retire(seen[0] ?? ''));
    const retired = value(await catalog.list({ sourceVm: 'vm-list', state: 'retired' }));
    expect(retired.snapshots.map(({ id }) => id)).toEqual([seen[0]]);
    const active = value(await catalog.list({ sourceVm: 'vm-list', state: 'active' }));
    expect(active.snapshots).toHaveLength(6);
    value(await catalog.addAlias('list-alias', made[0]?.snapshotId ?? ('' as never)));
    const named = value(await catalog.list({ alias: 'list-alias' }));
    expect(named.snapshots.map(({ id }) => id)).toEqual([made[0]?.snapshotId]);
    expect(errorKind(await catalog.list({ cursor: 'nonsense' }))).toBe('request-invalid');
  });
});
