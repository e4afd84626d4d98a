import { rename } from 'node:fs/promises';
import { expect, test } from 'vitest';
import { systemClock } from '../../src/clock.ts';
import { holdId } from '../../src/units.ts';
import { NODE, errorKind, headOf, onEachDialect, value } from '../catalog/catalogs.ts';
import { World, signal, nothingLeft } from './world.ts';

onEachDialect('collecting', (dialect) => {
  test('ancestors stay while a descendant needs them, and go when none does', async () => {
    await using world = await World.open(dialect);
    const { catalog } = world;
    const s0 = await world.publish();
    const s1 = await world.publish({ on: headOf(s0) });
    const s2 = await world.publish({ on: headOf(s1) });
    const s3 = await world.publish({ on: headOf(s1) });
    for (const { snapshotId } of [s0, s1]) value(await catalog.retire(snapshotId));
    const first = await world.collect();
    expect(first).toMatchObject({ contentsDeleted: 2, layersCondemned: 0, objectsReclaimed: 4 });
    expect(await world.readable(s2.contentId)).toBe(5);
    expect(await world.readable(s3.contentId)).toBe(5);
    for (const { snapshotId } of [s2, s3]) value(await catalog.retire(snapshotId));
    const second = await world.collect();
    expect(second).toMatchObject({ contentsDeleted: 2, layersCondemned: 4, objectsReclaimed: 8 });
    expect(await world.rows()).toMatchObject(nothingLeft);
    expect(await world.objects()).toEqual([]);
  });

  test('the plan says exactly what the run then does, and changes nothing', async () => {
    await using world = await World.open(dialect);
    const { catalog } = world;
    const base = await world.publish({ layers: 3 });
    const left = await world.publish({ layers: 2, on: headOf(base) });
    const right = await world.publish({ layers: 1, on: headOf(base) });
    const kept = await world.publish({ layers: 1, on: base.layers[0]?.uuid ?? null });
    for (const { snapshotId } of [base, left, right]) value(await catalog.retire(snapshotId));
    const before = await world.rows();
    const plan = value(await world.collector().plan(signal));
    expect(await world.rows()).toEqual(before);
    expect([...plan.contents].sort()).toEqual(
      [base, left, right].map(({ contentId }) => contentId).sort(),
    );
    expect(plan.layers).toHaveLength(5);
    expect(plan.massDelete).toBe(false);
    const report = await world.collect();
    expect(report.contentsDeleted).toBe(plan.contents.length);
    expect(report.layersCondemned).toBe(plan.layers.length);
    expect(report.objectsReclaimed).toBe(plan.artifacts.length);
    expect(String(report.bytesReclaimed)).toBe(plan.bytes);
    expect(await world.readable(kept.contentId)).toBe(4);
  });

  test('held and volume-backed contents stay, whatever became of their snapshots', async () => {
    await using world = await World.open(dialect);
    const { catalog } = world;
    const one = await world.publish();
    const two = await world.publish();
    const hold = holdId('hold-1');
    const target = { snapshot: one.snapshotId };
    value(await catalog.hold({ holdId: hold, nodeId: NODE, target, purpose: 'vm' }));
    value(await catalog.createVolume({ id: 'vol', contentId: one.contentId }));
    value(await catalog.retire(one.snapshotId));
    expect((await world.collect()).contentsDeleted).toBe(0);
    value(await catalog.switchVolume({ id: 'vol', version: 1, contentId: two.contentId }));
    value(await catalog.retire(two.snapshotId));
    expect((await world.collect()).contentsDeleted).toBe(0);
    await world.readable(one.contentId);
    value(await catalog.release(hold));
    expect((await world.collect()).contentsDeleted).toBe(1);
    await world.readable(two.contentId);
    value(await catalog.deleteVolume('vol'));
    expect((await world.collect()).contentsDeleted).toBe(1);
    expect(await world.rows()).toMatchObject(nothingLeft);
  });

  test('an object shared by two contents goes with the last of them', async () => {
    await using world = await World.open(dialect);
    const first = await world.publish();
    const shared = first.artifacts[0];
    if (shared === undefined) throw new Error('no object');
    const second = await world.prepare();
    value(await world.catalog.publish({ ...second, artifacts: [shared] }));
    value(await world.catalog.abandonUploads(NODE, []));
    value(await world.catalog.retire(first.snapshotId));
    await world.collect();
    expect(await world.readable(second.contentId)).toBe(3);
    value(await world.catalog.retire(second.snapshotId));
    await world.collect();
    expect(await world.objects()).toEqual([]);
  });

  test('above the guard nothing is deleted without force', async () => {
    await using world = await World.open(dialect);
    const made = [];
    for (let count = 0; count < 4; count += 1) made.push(await world.publish());
    for (const { snapshotId } of made.slice(0, 2)) value(await world.catalog.retire(snapshotId));
    const before = await world.rows();
    const guarded = world.collector({ massDeleteMin: 3, massDeleteShare: 0.4 });
    expect(value(await guarded.plan(signal)).massDelete).toBe(true);
    expect(errorKind(await guarded.run({}, signal))).toBe('mass-delete');
    expect(await world.rows()).toEqual(before);
    expect(value(await guarded.runs(1))[0]).toMatchObject({ outcome: 'stopped' });
    expect(value(await guarded.run({ force: true }, signal)).contentsDeleted).toBe(2);
    expect(value(await guarded.runs(1))[0]).toMatchObject({ outcome: 'done', contentsDeleted: 2 });
  });

  test('a store that cannot be read ends the run, and the next one finishes', async () => {
    await using world = await World.open(dialect);
    const made = await world.publish({ layers: 2 });
    value(await world.catalog.retire(made.snapshotId));
    const { root } = world;
    await rename(root, `${root}.away`);
    expect(errorKind(await world.collector().run({}, signal))).toBe('store-io');
    expect((await world.rows())['reclaim']).toBe(4);
    await rename(`${root}.away`, root);
    expect(await world.collect()).toMatchObject({ objectsReclaimed: 4 });
  });

  test('a missing object counts as deleted', async () => {
    await using world = await World.open(dialect);
    const made = await world.publish();
    value(await world.store.delete(made.manifest.key, () => Promise.resolve(true)));
    value(await world.catalog.retire(made.snapshotId));
    expect(await world.collect()).toMatchObject({ objectsReclaimed: 3 });
    expect(await world.rows()).toMatchObject(nothingLeft);
  });

  test('records are trimmed after the retention time, and names stay spent', async () => {
    let nowMs = 1_000_000;
    const clock = { ...systemClock, nowMs: () => nowMs };
    await using world = await World.open(dialect, { clock });
    const { catalog } = world;
    const gone = await world.publish({ alias: 'gone' });
    const kept = await world.publish({ alias: 'kept' });
    const open = holdId('open');
    const target = { content: kept.contentId };
    value(await catalog.hold({ holdId: open, nodeId: NODE, target, purpose: 'vm' }));
    value(await catalog.release(holdId('closed')));
    value(await catalog.retire('gone'));
    const config = { retentionMs: 1000 };
    expect(await world.collect(config)).toMatchObject({ holdsTrimmed: 0, snapshotsTrimmed: 0 });
    nowMs -= 24 * 3_600_000;
    expect(await world.collect(config)).toMatchObject({ holdsTrimmed: 0, snapshotsTrimmed: 0 });
    nowMs += 48 * 3_600_000;
    expect(await world.collect(config)).toMatchObject({ holdsTrimmed: 1, snapshotsTrimmed: 1 });
    expect(errorKind(await catalog.show(gone.snapshotId))).toBe('snapshot-missing');
    expect(errorKind(await catalog.addAlias('gone', kept.snapshotId))).toBe('alias-taken');
    expect(value(await catalog.listHolds({})).map(({ id }) => id)).toEqual([open]);
    await world.readable(kept.contentId);
  });

  test('a cancelled run stops between two transactions and the next one finishes', async () => {
    await using world = await World.open(dialect);
    for (let count = 0; count < 6; count += 1) {
      const { snapshotId } = await world.publish({ layers: 2 });
      value(await world.catalog.retire(snapshotId));
    }
    const stop = new AbortController();
    let writes = 0;
    const catalog = await world.another({
      onTransaction: ({ name }) => {
        if (name.startsWith('condemn') && (writes += 1) === 3) stop.abort();
      },
    });
    const cancelled = world.collector({ batchMax: 2 }, catalog);
    expect(errorKind(await cancelled.run({}, stop.signal))).toBe('cancelled');
    expect((await world.rows())['layer']).toBe(12);
    await world.collect();
    expect(await world.rows()).toMatchObject(nothingLeft);
    expect(await world.objects()).toEqual([]);
  });
});
