import SqliteConnection from 'better-sqlite3';
import { sql } from 'kysely';
import pg from 'pg';
import { expect, test } from 'vitest';
import type { ArtifactStore } from '../../src/artifact/store.ts';
import { takeHold, releaseHolds, retireSnapshot } from '../../src/catalog/holds.ts';
import { publish } from '../../src/catalog/publish.ts';
import { insertReclaims } from '../../src/catalog/reclaim.queries.ts';
import { selectUploads, takeUploads } from '../../src/catalog/upload.queries.ts';
import { Audit } from '../../src/gc/audit.ts';
import { condemnContents, condemnLayers } from '../../src/gc/condemn.ts';
import { reclaimBatch } from '../../src/gc/reclaim.ts';
import type { Result } from '../../src/result.ts';
import { holdId, nodeId } from '../../src/units.ts';
import type { LayerUuid } from '../../src/units.ts';
import { NODE, errorKind, headOf, onEachDialect, value } from '../catalog/catalogs.ts';
import { barrier } from './barrier.ts';
import { World, signal } from './world.ts';

/** Removes a layer's record as no program of ours could. */
async function breakLayer(url: string, uuid: LayerUuid): Promise<void> {
  if (url.startsWith('sqlite:')) {
    const db = new SqliteConnection(url.slice('sqlite:'.length));
    db.pragma('foreign_keys = OFF');
    db.prepare('DELETE FROM layer WHERE uuid = ?').run(uuid);
    db.close();
    return;
  }
  const client = new pg.Client({ connectionString: url });
  await client.connect();
  await client.query('SET session_replication_role = replica');
  await client.query('DELETE FROM layer WHERE uuid = $1', [uuid]);
  await client.end();
}

onEachDialect('a race', (dialect) => {
  test('a publish on a parent that is being condemned fails cleanly', async () => {
    await using world = await World.open(dialect);
    const other = await world.another();
    const base = await world.publish();
    value(await world.catalog.retire(base.snapshotId));
    const child = await world.prepare({ on: headOf(base) });
    const gate = barrier();
    const condemning = other.database.write('test', async (tx) => {
      await condemnContents(tx, 10);
      await condemnLayers(tx, 10);
      await gate.pass();
    });
    await gate.arrived;
    const publishing = world.catalog.publish(child);
    await world.untilWaiting(publishing);
    gate.open();
    await condemning;
    expect(errorKind(await publishing)).toBe('layer-missing');
    value(await world.catalog.abandonUploads(NODE, []));
    await world.collect();
    expect(await world.objects()).toEqual([]);
  });

  test('a parent under a publish that has not committed yet is not condemned', async () => {
    await using world = await World.open(dialect);
    const other = await world.another();
    const base = await world.publish({ layers: 2 });
    const child = await world.prepare({ on: headOf(base) });
    value(await world.catalog.retire(base.snapshotId));
    const gate = barrier();
    const publishing = other.database.write('test', async (tx) => {
      const published = await publish(tx, child);
      await gate.pass();
      return published;
    });
    await gate.arrived;
    const collecting = world.collector().run({}, signal);
    await world.untilWaiting(collecting);
    gate.open();
    await publishing;
    expect(value(await collecting)).toMatchObject({ contentsDeleted: 1, layersCondemned: 0 });
    expect(await world.readable(child.contentId)).toBe(5);
  });

  test('a hold and the deletion of its content: the first one wins', async () => {
    await using world = await World.open(dialect);
    const other = await world.another();
    for (const first of ['delete', 'hold'] as const) {
      const made = await world.publish();
      value(await world.catalog.retire(made.snapshotId));
      const request = {
        holdId: holdId(`race-${first}`),
        nodeId: NODE,
        target: { content: made.contentId },
        purpose: 'vm',
      };
      const gate = barrier();
      const firstTask = other.database.write('test', async (tx) => {
        if (first === 'delete') await condemnContents(tx, 10);
        else await takeHold(tx, request);
        await gate.pass();
      });
      await gate.arrived;
      const second: Promise<Result<unknown, { kind: string; message: string }>> =
        first === 'delete' ? world.catalog.hold(request) : world.collector().run({}, signal);
      await world.untilWaiting(second);
      gate.open();
      await firstTask;
      if (first === 'delete') expect(errorKind(await second)).toBe('content-missing');
      else {
        value(await second);
        expect(await world.readable(made.contentId)).toBe(3);
      }
    }
  });

  test('the last two claims on a content, ended at once, leave it to the collector', async () => {
    await using world = await World.open(dialect);
    const other = await world.another();
    const made = await world.publish();
    const hold = holdId('last');
    const target = { content: made.contentId };
    value(await world.catalog.hold({ holdId: hold, nodeId: NODE, target, purpose: 'vm' }));
    const gate = barrier();
    const releasing = other.database.write('test', async (tx) => {
      await releaseHolds(tx, [hold]);
      await gate.pass();
    });
    await gate.arrived;
    const retiring = world.catalog.database.write('test', (tx) =>
      retireSnapshot(tx, made.snapshotId),
    );
    await world.untilWaiting(retiring);
    gate.open();
    await Promise.all([releasing, retiring]);
    expect(await world.collect()).toMatchObject({ contentsDeleted: 1, layersCondemned: 1 });
  });

  test('a release that overtakes its own hold wins for good', async () => {
    await using world = await World.open(dialect);
    const other = await world.another();
    const made = await world.publish();
    const hold = holdId('overtaken');
    const target = { content: made.contentId };
    const gate = barrier();
    const holding = other.database.write('test', async (tx) => {
      await takeHold(tx, { holdId: hold, nodeId: NODE, target, purpose: 'vm' });
      await gate.pass();
    });
    await gate.arrived;
    const releasing = world.catalog.release(hold);
    await world.untilWaiting(releasing);
    gate.open();
    await holding;
    value(await releasing);
    expect(value(await world.catalog.listHolds({}))).toEqual([]);
  });

  test('a publish and the cleanup of its dead node: the first one wins', async () => {
    await using world = await World.open(dialect);
    const other = await world.another();
    const late = nodeId('late');
    value(await world.catalog.registerNode({ nodeId: late }));
    for (const first of ['cleanup', 'publish'] as const) {
      const request = await world.prepare({ node: late });
      const gate = barrier();
      const firstTask = other.database.write('test', async (tx) => {
        if (first === 'publish') await publish(tx, request);
        else {
          const uploads = await selectUploads(tx, late);
          await insertReclaims(
            tx,
            await takeUploads(
              tx,
              uploads.map(({ key }) => key),
            ),
          );
        }
        await gate.pass();
      });
      await gate.arrived;
      const second: Promise<Result<unknown, { kind: string; message: string }>> =
        first === 'publish' ? world.catalog.forgetNode(late) : world.catalog.publish(request);
      await world.untilWaiting(second);
      gate.open();
      await firstTask;
      if (first === 'cleanup') expect(errorKind(await second)).toBe('upload-missing');
      else {
        expect(value(await second)).toMatchObject({ uploadsReclaimed: 0 });
        await world.collect();
        expect(await world.readable(request.contentId)).toBe(3);
      }
    }
  });

  test('two collectors on one queue do everything once', async () => {
    await using world = await World.open(dialect);
    const other = await world.another();
    let layers = 0;
    for (let count = 0; count < 12; count += 1) {
      const made = await world.publish({ layers: 1 + (count % 3) });
      layers += made.layers.length;
      value(await world.catalog.retire(made.snapshotId));
    }
    const config = { batchMax: 3, inFlightMax: 2 };
    const reports = (
      await Promise.all([
        world.collector(config).run({}, signal),
        world.collector(config, other).run({}, signal),
      ])
    ).map((report) => value(report));
    const sum = (of: (report: (typeof reports)[number]) => number): number =>
      reports.reduce((total, report) => total + of(report), 0);
    // One may end while the other is still at it; what neither saw is left to the next run.
    const rest = await world.collect();
    expect(sum((report) => report.contentsDeleted) + rest.contentsDeleted).toBe(12);
    expect(sum((report) => report.layersCondemned) + rest.layersCondemned).toBe(layers);
    expect(sum((report) => report.objectsReclaimed) + rest.objectsReclaimed).toBe(layers + 24);
    expect(await world.objects()).toEqual([]);
  });

  test('a collector that slept past its claim deletes nothing and counts nothing', async () => {
    await using world = await World.open(dialect);
    const other = await world.another();
    const made = await world.publish();
    value(await world.catalog.retire(made.snapshotId));
    await world.catalog.database.write('test', (tx) => condemnContents(tx, 10));
    await world.catalog.database.write('test', (tx) => condemnLayers(tx, 10));
    const gate = barrier();
    const asleep = new Proxy<ArtifactStore>(world.store, {
      get: (store, name) =>
        name === 'delete'
          ? async (...call: Parameters<ArtifactStore['delete']>) => {
              await gate.pass();
              return await store.delete(...call);
            }
          : (Reflect.get(store, name) as unknown),
    });
    const { database } = other;
    const config = { batchMax: 10, claimMs: -1, inFlightMax: 8 };
    const sleeping = reclaimBatch({ database, store: asleep }, config, signal);
    await gate.arrived;
    expect(await world.collect()).toMatchObject({ objectsReclaimed: 3 });
    gate.open();
    expect(await sleeping).toMatchObject({ claimed: 3, objects: 0 });
    expect((await world.rows())['reclaim']).toBe(0);
  });

  test('a broken ancestor record stops the run, and what is below it stays', async () => {
    await using world = await World.open(dialect);
    const base = await world.publish({ layers: 2 });
    const top = await world.publish({ on: headOf(base) });
    value(await world.catalog.retire(base.snapshotId));
    value(await world.catalog.retire(top.snapshotId));
    await breakLayer(world.url, headOf(base));
    expect(errorKind(await world.catalog.lineage(headOf(top)))).toBe('catalog-corrupt');
    expect(errorKind(await world.collector().run({}, signal))).toBe('catalog-corrupt');
    const uuids = base.layers.map(({ uuid }) => uuid);
    expect(value(await world.catalog.findLayers([...uuids, headOf(top)]))).toHaveLength(2);
    const audit = new Audit(
      {
        database: world.catalog.database,
        store: world.store,
        readHeader: () => Promise.resolve(null),
      },
      { bytes: true, repair: false },
    );
    const { findings } = await audit.run(signal);
    expect(
      findings.filter(({ kind }) => kind === 'dangling').map(({ subject }) => subject),
    ).toContain(headOf(base));
  });

  test('a transaction that fails while another waits leaves the other whole', async () => {
    await using world = await World.open(dialect);
    const request = await world.prepare();
    const gate = barrier();
    const failing = world.catalog.database.write('test', async (tx) => {
      await sql`INSERT INTO node (id, registered_at_ms) VALUES ('ghost', 1)`.execute(tx.db);
      await gate.pass();
      throw new Error('changed my mind');
    });
    await gate.arrived;
    const publishing = world.catalog.publish(request);
    gate.open();
    await expect(failing).rejects.toThrow('changed my mind');
    expect(value(await publishing).created).toBe(true);
    expect(value(await world.catalog.listNodes()).map(({ id }) => id)).toEqual([NODE]);
  });

  test('a call inside a transaction says so instead of waiting for itself', async () => {
    await using world = await World.open(dialect);
    const inside = world.catalog.database.write('outer', () => world.catalog.ping());
    await expect(inside).rejects.toThrow('no transaction inside another');
    value(await world.catalog.ping());
  });
});
