import { mkdtemp } from 'node:fs/promises';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import type { Catalog } from '../../src/catalog/catalog.ts';
import { Collector } from '../../src/gc/collector.ts';
import { materialise } from '../../src/restore/materialise.ts';
import { directHolds } from '../../src/restore/restore-hold.ts';
import { Harness, never, valueOf } from '../capture/harness.ts';

/** A catalog whose `method` may be stood in for. */
const instead = <K extends keyof Catalog>(real: Catalog, method: K, other: Catalog[K]): Catalog =>
  new Proxy(real, {
    get: (target, name) => (name === method ? other : (Reflect.get(target, name) as unknown)),
  });

test('a snapshot that is retired and collected while it is read is read to its end, then goes', async () => {
  await using harness = await Harness.make();
  await using vm = await harness.vm({ dialect: 'aenv', memoryMib: 8 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  const { snapshotId } = await harness.published(vmId);
  const { catalog, store, restores } = harness;
  const collector = new Collector({ database: catalog.database, store, name: 'test' });
  const seen: (readonly string[])[] = [];
  const lineage: Catalog['lineage'] = async (head) => {
    valueOf(await catalog.retire(snapshotId));
    expect(valueOf(await collector.run({}, never)).objectsReclaimed).toBe(0);
    seen.push(valueOf(await catalog.listHolds({})).map(({ purpose }) => purpose));
    return await catalog.lineage(head);
  };
  const folder = await mkdtemp(join(harness.folder, 'restore-'));
  const deps = { ...restores, catalog: instead(catalog, 'lineage', lineage) };
  const made = await materialise(deps, { snapshot: snapshotId, folder, signal: never });
  expect(made.vmStatePath).not.toBeNull();
  expect(seen).toEqual([['restore']]);
  expect(valueOf(await catalog.listHolds({}))).toEqual([]);
  expect(valueOf(await collector.run({}, never)).objectsReclaimed).toBe(3);

  // Retired, gone or cut short: refused, and no hold stays.
  for (const snapshot of [snapshotId, 'nowhere']) {
    const failed = materialise(restores, { snapshot, folder: join(folder, 'x'), signal: never });
    await expect(failed).rejects.toThrow();
  }
  expect(valueOf(await catalog.listHolds({}))).toEqual([]);
});

test('a hold that cannot be released is told by name, and stays open until it is', async () => {
  await using harness = await Harness.make();
  await using vm = await harness.vm({ dialect: 'aenv', memoryMib: 8 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  const { snapshotId } = await harness.published(vmId);
  const { catalog, restores } = harness;
  const told: string[] = [];
  const away = { ok: false, error: { kind: 'catalog-unavailable', message: 'gone' } } as const;
  const cut = instead(catalog, 'release', () => Promise.resolve(away));
  const holds = directHolds(cut, (hold, { kind }) => told.push(hold, kind));
  const folder = await mkdtemp(join(harness.folder, 'restore-'));
  await materialise({ ...restores, holds }, { snapshot: snapshotId, folder, signal: never });
  const open = valueOf(await catalog.listHolds({}));
  expect(told).toEqual([open[0]?.id, 'catalog-unavailable']);
  expect(open).toMatchObject([{ purpose: 'restore', nodeId: 'test-node' }]);
});
