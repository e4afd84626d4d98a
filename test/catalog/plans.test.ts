/** How SQLite runs the catalog's statements once there are many rows, and it knows of them. */
import { mkdtemp, rm } from 'node:fs/promises';
import { join } from 'node:path';
import SqliteConnection from 'better-sqlite3';
import { afterAll, expect, test } from 'vitest';
import { loadCatalog } from '../../bench/catalog-load.ts';
import { createNaive } from '../../bench/catalog-naive.ts';
import { openCatalog } from '../../src/catalog/open.ts';
import { Collector } from '../../src/gc/collector.ts';
import { holdId, layerUuid } from '../../src/units.ts';
import { fastFolder } from '../../tools/postgres-server.ts';
import { MemoryArtifactStore } from '../gc/memory-store.ts';
import { NODE, headOf, patient, prepare, value } from './catalogs.ts';

const folder = await mkdtemp(join(fastFolder, 'varve-plans-'));
afterAll(() => rm(folder, { recursive: true, force: true }));

/**
 * Tables that grow with what is retained; the others are queues, or hold what is being done. A page
 * of snapshots in the order of the list's own index is no walk.
 */
const page = 'SCAN snapshot USING INDEX snapshot_created';
const large = /SCAN (layer|artifact|content|content_head|content_artifact|snapshot|hold|alias)\b/;

test('no statement of a publish, a claim, a question or a collection walks a large table', async () => {
  const path = join(folder, 'catalog.db');
  const statements = new Set<string>();
  const onStatement = ({ sql }: { sql: string }): void => void statements.add(sql);
  const catalog = value(await openCatalog({ ...patient, url: `sqlite:${path}`, onStatement }));
  value(await catalog.registerNode({ nodeId: NODE }));
  await createNaive(catalog.database);
  const loaded = await loadCatalog(`sqlite:${path}`, 3200, { node: NODE, seed: 1 });
  const base = loaded.heads[3];
  if (base === undefined) throw new Error('nothing is loaded');
  await catalog.close();
  statements.clear();
  // Opened again: a connection that was open before the statistics keeps planning without them.
  const again = value(await openCatalog({ ...patient, url: `sqlite:${path}`, onStatement }));
  const request = await prepare(again, { on: layerUuid(base.layer), alias: 'name' });
  value(await again.publish(request));
  value(await again.resolve('name'));
  value(await again.resolve(base.snapshot));
  expect(value(await again.lineage(layerUuid(base.layer)))).toHaveLength(32);
  value(await again.findLayers([headOf(request)]));
  value(await again.markSuspects({ layers: [headOf(request)], reason: 'pages are missing' }));
  value(await again.list({ limit: 10 }));
  value(await again.list({ limit: 10, sourceVm: 'vm-1' }));
  const target = { content: request.contentId };
  value(await again.hold({ holdId: holdId('h'), nodeId: NODE, target, purpose: 'vm' }));
  value(await again.listHolds({ nodeId: NODE }));
  value(await again.counts(NODE));
  value(await again.createVolume({ id: 'v', contentId: request.contentId }));
  value(await again.deleteVolume('v'));
  value(await again.retire(request.snapshotId));
  value(await again.release(holdId('h')));
  const deps = { database: again.database, store: new MemoryArtifactStore(), name: 'test' };
  const signal = new AbortController().signal;
  const report = value(await new Collector(deps).run({}, signal));
  expect(report).toMatchObject({ layersCondemned: 1, objectsReclaimed: 3 });
  await again.close();

  const db = new SqliteConnection(path, { readonly: true });
  const walks = [...statements]
    .filter((text) => /^(select|insert|update|delete|with)/i.test(text))
    .flatMap((text) => {
      const blanks = (text.match(/\?/g) ?? []).map(() => 1);
      const plan = db.prepare<number[], { detail: string }>(`EXPLAIN QUERY PLAN ${text}`);
      return plan
        .all(...blanks)
        .filter(({ detail }) => large.test(detail) && detail !== page)
        .map(({ detail }) => `${detail}: ${text.slice(0, 200)}`);
    });
  db.close();
  expect(statements.size).toBeGreaterThan(40);
  expect(walks).toEqual([]);
});
