import { beforeAll, expect, test } from 'vitest';
import type { Catalog } from '../../src/catalog/catalog.ts';
import type { OpenCatalog } from '../../src/catalog/open.ts';
import { holdId } from '../../src/units.ts';
import {
  NODE,
  errorKind,
  headOf,
  onEachDialect,
  openTest,
  prepare,
  publishOne,
  uuid,
  value,
} from './catalogs.ts';

/** Why the snapshot is suspect; null where it is not. */
const reasonOf = async (catalog: Catalog, { snapshotId }: { snapshotId: string }) =>
  value(await catalog.show(snapshotId)).suspectReason;

/** A layer whose capture looked at every page. */
async function publishComplete(catalog: Catalog, on: ReturnType<typeof uuid>) {
  const request = await prepare(catalog, { on });
  const layers = request.layers.map((layer) => ({ ...layer, complete: true }));
  value(await catalog.publish({ ...request, layers }));
  return request;
}

onEachDialect('suspects', (dialect) => {
  let catalog: OpenCatalog;
  beforeAll(async () => {
    catalog = await openTest(dialect);
    value(await catalog.registerNode({ nodeId: NODE }));
    return () => catalog.close();
  });

  test('a mark reaches all that is on the layer, up to layers that looked at every page', async () => {
    const base = await publishOne(catalog);
    const lacking = await publishOne(catalog, { on: headOf(base) });
    const child = await publishOne(catalog, { on: headOf(lacking), layers: 3 });
    const right = await publishComplete(catalog, headOf(lacking));
    const onRight = await publishOne(catalog, { on: headOf(right) });
    const request = { layers: [headOf(lacking)], reason: 'pages 1 to 3' };
    const marked = value(await catalog.markSuspects(request));
    expect(marked.snapshots).toEqual([lacking.snapshotId, child.snapshotId].sort());
    expect(marked.unknown).toEqual([]);
    for (const each of [lacking, child]) expect(await reasonOf(catalog, each)).toBe('pages 1 to 3');
    for (const each of [base, right, onRight]) expect(await reasonOf(catalog, each)).toBeNull();
    // The first reason stays.
    value(await catalog.markSuspects({ ...request, reason: 'something else' }));
    expect(await reasonOf(catalog, child)).toBe('pages 1 to 3');
  });

  test('a publish on a marked layer takes the mark over, unless it looked at every page', async () => {
    const base = await publishOne(catalog);
    value(await catalog.markSuspects({ layers: [headOf(base)], reason: 'lost' }));
    const on = await publishOne(catalog, { on: headOf(base), layers: 2 });
    const further = await publishOne(catalog, { on: headOf(on) });
    for (const each of [on, further]) expect(await reasonOf(catalog, each)).toBe('lost');
    const right = await publishComplete(catalog, headOf(on));
    expect(await reasonOf(catalog, right)).toBeNull();
    expect(await reasonOf(catalog, await publishOne(catalog, { on: headOf(right) }))).toBeNull();
    const published = value(await catalog.lineage(headOf(right)));
    const marks = published.map(({ suspectReason, complete }) => [suspectReason, complete]);
    const lost = ['lost', false];
    expect(marks).toEqual([lost, lost, lost, [null, true]]);
  });

  test('a suspect snapshot is refused until its user insists, or the mark is taken away', async () => {
    const { snapshotId } = await publishOne(catalog);
    value(await catalog.setSuspect(snapshotId, 'page 7 is missing'));
    const refused = await catalog.resolve(snapshotId);
    expect(errorKind(refused)).toBe('snapshot-suspect');
    expect(!refused.ok && refused.error.message).toContain('page 7 is missing');
    const claim = { nodeId: NODE, target: { snapshot: snapshotId }, purpose: 'restore' };
    const held = await catalog.hold({ ...claim, holdId: holdId('suspect-1') });
    expect(errorKind(held)).toBe('snapshot-suspect');
    value(await catalog.hold({ ...claim, holdId: holdId('suspect-2'), allowSuspect: true }));
    value(await catalog.setSuspect(snapshotId, null));
    value(await catalog.resolve(snapshotId));
  });

  test('layers that the catalog does not have are named', async () => {
    const base = await publishOne(catalog);
    const stranger = uuid();
    const request = { layers: [stranger, headOf(base)], reason: 'lost' };
    expect(value(await catalog.markSuspects(request)).unknown).toEqual([stranger]);
    const none = await catalog.markSuspects({ layers: [], reason: 'lost' });
    expect(errorKind(none)).toBe('request-invalid');
  });
});
