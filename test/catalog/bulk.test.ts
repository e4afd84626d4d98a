/**
 * More in one call than one statement can take: SQLite binds at most 32,766 parameters, PostgreSQL
 * 65,535.
 */
import { expect, test } from 'vitest';
import type { ContentHead, NewLayer, PublishRequest } from '../../src/catalog/catalog.ts';
import type { OpenCatalog } from '../../src/catalog/open.ts';
import { newArtifact } from '../../src/artifact/store.ts';
import { bytes, contentId, holdId, snapshotId } from '../../src/units.ts';
import { NODE, onEachDialect, openTest, upload, uuid, value } from './catalogs.ts';

const TIMEOUT_MS = 180_000;
/** As many as `recordUpload` takes at once. */
const UPLOADS_MAX = 512;
const HEADS = 64;
/** Sizes just above what one statement takes: layers and spent holds are rows of 6 columns. */
const sizes = {
  sqlite: { chainLayers: 86, keys: 33_000, holds: 5_500 },
  postgres: { chainLayers: 172, keys: 66_000, holds: 11_000 },
} as const;

async function recorded(catalog: OpenCatalog, count: number) {
  const all = [];
  while (all.length < count) {
    const few = Math.min(UPLOADS_MAX, count - all.length);
    const artifacts = Array.from({ length: few }, () => upload());
    all.push(...value(await catalog.recordUpload({ nodeId: NODE, artifacts })));
  }
  return all;
}

/** One head per role, each on a chain of its own, and every layer new. */
async function wide(catalog: OpenCatalog, chainLayers: number): Promise<PublishRequest> {
  const artifacts = await recorded(catalog, HEADS * chainLayers);
  const layers: NewLayer[] = [];
  const heads: ContentHead[] = [];
  artifacts.forEach((artifact, index) => {
    const isBase = index % chainLayers === 0;
    const predecessor = isBase ? null : (layers.at(-1)?.uuid ?? null);
    layers.push({ uuid: uuid(), predecessor, virtualBytes: bytes(4096), artifact });
    if (index % chainLayers !== chainLayers - 1) return;
    const role = heads.length === 0 ? 'memory' : `drive:d${heads.length}`;
    const layer = layers.at(-1)?.uuid;
    if (layer !== undefined) heads.push({ role, layer });
  });
  const manifests = await catalog.recordUpload({ nodeId: NODE, artifacts: [upload('manifest')] });
  const [manifest] = value(manifests);
  if (manifest === undefined) throw new Error('no upload');
  return {
    ...{ snapshotId: snapshotId('wide'), contentId: contentId('wide'), sourceVm: 'vm' },
    ...{ nodeId: NODE, createdAtMs: 1, manifest, layers, heads, artifacts: [] },
  };
}

onEachDialect('what one statement cannot take', (dialect) => {
  const { chainLayers, keys: keyCount, holds: holdCount } = sizes[dialect.name];

  test(
    'is published in one transaction: thousands of layers under all the heads there may be',
    async () => {
      const catalog = await openTest(dialect);
      value(await catalog.registerNode({ nodeId: NODE }));
      const request = await wide(catalog, chainLayers);
      expect(value(await catalog.publish(request)).created).toBe(true);
      expect(value(await catalog.publish(request)).created).toBe(false);
      const uuids = request.layers.map((layer) => layer.uuid);
      expect(value(await catalog.findLayers(uuids))).toHaveLength(HEADS * chainLayers);
      for (const { layer } of [request.heads[0], request.heads.at(-1)].flatMap((h) => h ?? [])) {
        expect(value(await catalog.lineage(layer))).toHaveLength(chainLayers);
      }
      expect(value(await catalog.listUploads(NODE))).toEqual([]);
      await catalog.close();
    },
    TIMEOUT_MS,
  );

  test(
    'is asked for, given up and released at once',
    async () => {
      const catalog = await openTest(dialect);
      value(await catalog.registerNode({ nodeId: NODE }));
      const some = await recorded(catalog, 3);
      const strange = Array.from({ length: keyCount }, () => newArtifact(upload()).key);
      const keys = [...some.map(({ key }) => key), ...strange];
      expect(value(await catalog.giveUpUploads(keys))).toBe(some.length);
      const unknown = Array.from({ length: keyCount }, () => uuid());
      expect(value(await catalog.findLayers(unknown))).toEqual([]);
      const holds = Array.from({ length: holdCount }, (_, index) => holdId(`hold-${index}`));
      value(await catalog.releaseMany(holds));
      const target = { snapshot: 'any' };
      const late = {
        holdId: holds.at(-1) ?? holdId('none'),
        nodeId: NODE,
        target,
        purpose: 'test',
      };
      expect(await catalog.hold(late)).toMatchObject({ error: { kind: 'hold-released' } });
      await catalog.close();
    },
    TIMEOUT_MS,
  );
});
