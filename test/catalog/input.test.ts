import { beforeAll, expect, test } from 'vitest';
import type { PublishRequest } from '../../src/catalog/catalog.ts';
import type { OpenCatalog } from '../../src/catalog/open.ts';
import type { StatementEvent } from '../../src/catalog/database.ts';
import { holdId } from '../../src/units.ts';
import {
  NODE,
  errorKind,
  headOf,
  onEachDialect,
  openTest,
  prepare,
  publishOne,
  stray,
  upload,
  uuid,
  value,
} from './catalogs.ts';

const badNames = [
  '',
  '..',
  '.',
  'a/b',
  '../../etc/passwd',
  'a..b',
  'a\0b',
  'a b',
  'a\n',
  'A',
  'Base',
  'ä',
  '-a',
  'x'.repeat(129),
  'x'.repeat(10_240),
  "a'; DROP TABLE layer; --",
];
const badNumbers = [-1, 1.5, 2 ** 53, 9_223_372_036_854_775_808, Number.NaN, Infinity, '0x10', '1'];

onEachDialect('input', (dialect) => {
  let catalog: OpenCatalog;
  const statements: StatementEvent[] = [];
  beforeAll(async () => {
    catalog = await openTest(dialect, { onStatement: (event) => statements.push(event) });
    value(await catalog.registerNode({ nodeId: NODE }));
    return () => catalog.close();
  });

  /** Refused before the database was asked anything. */
  async function refused(request: unknown): Promise<void> {
    const before = statements.length;
    const result = await catalog.publish(request as PublishRequest);
    expect(errorKind(result)).toBe('request-invalid');
    expect(statements.length).toBe(before);
  }

  test('names that are paths or too long are refused, unwritten', async () => {
    const good = await prepare(catalog);
    for (const bad of badNames) {
      await refused({ ...good, snapshotId: bad });
      await refused({ ...good, contentId: bad });
      await refused({ ...good, alias: bad });
      await refused({ ...good, heads: [{ role: bad, layer: headOf(good) }] });
      const before = statements.length;
      expect(errorKind(await catalog.addAlias(bad, good.snapshotId))).toBe('request-invalid');
      expect(errorKind(await catalog.release(bad as never))).toBe('request-invalid');
      expect(statements.length).toBe(before);
      expect(errorKind(await catalog.resolve(bad))).toBe('snapshot-missing');
      expect(errorKind(await catalog.retire(bad))).toBe('snapshot-missing');
    }
    value(await catalog.publish(good));
  });

  test('numbers that are no exact sizes are refused before anything is written', async () => {
    const good = await prepare(catalog);
    const [layer] = good.layers;
    if (layer === undefined) throw new Error('no layer');
    for (const bad of badNumbers) {
      await refused({ ...good, createdAtMs: bad });
      await refused({ ...good, layers: [{ ...layer, virtualBytes: bad }] });
      await refused({ ...good, manifest: { ...good.manifest, sizeBytes: bad } });
      const sizes = { nodeId: NODE, artifacts: [{ ...upload(), sizeBytes: bad as never }] };
      expect(errorKind(await catalog.recordUpload(sizes))).toBe('request-invalid');
    }
  });

  test('sizes up to 2^53 - 1 come back exactly', async () => {
    const max = Number.MAX_SAFE_INTEGER;
    const [manifest] = value(
      await catalog.recordUpload({ nodeId: NODE, artifacts: [upload('manifest', max)] }),
    );
    const request = await prepare(catalog);
    if (manifest === undefined) throw new Error('no manifest');
    const layers = request.layers.map((layer) => ({ ...layer, virtualBytes: max as never }));
    value(await catalog.publish({ ...request, manifest, layers, createdAtMs: max }));
    const { content, snapshot } = value(await catalog.resolve(request.snapshotId));
    expect(content.manifest.sizeBytes).toBe(max);
    expect(snapshot.createdAtMs).toBe(max);
    const [layer] = value(await catalog.lineage(headOf(request)));
    expect(layer?.virtualBytes).toBe(max);
    value(await catalog.abandonUploads(NODE, []));
  });

  test('chains that turn back on themselves are refused, unwritten', async () => {
    const good = await prepare(catalog, { layers: 3 });
    const [a, b, c] = good.layers;
    if (a === undefined || b === undefined || c === undefined) throw new Error('three layers');
    await refused({ ...good, layers: [{ ...a, predecessor: c.uuid }, b, c] });
    await refused({ ...good, layers: [{ ...a, predecessor: a.uuid }, b, c] });
    await refused({ ...good, layers: [b, a, c] });
    await refused({ ...good, layers: [a, a, b, c] });
    await refused({ ...good, heads: [{ role: 'memory', layer: a.uuid }] });
    for (const bad of [...badNames, '00000000-0000-0000-0000-000000000000', uuid().toUpperCase()]) {
      await refused({ ...good, layers: [{ ...a, uuid: bad }, b, c] });
      await refused({ ...good, heads: [{ role: 'memory', layer: bad }] });
    }
    value(await catalog.publish(good));
  });

  test('objects whose key or digest is none are refused, unwritten', async () => {
    const good = await prepare(catalog);
    const other = stray('manifest');
    for (const bad of [
      { ...good.manifest, digest: 'sha256:xyz' },
      { ...good.manifest, digest: 'md5:d41d8cd98f00b204e9800998ecf8427e' },
      { ...good.manifest, digest: other.digest },
      { ...good.manifest, key: `../${good.manifest.key}` },
      { ...good.manifest, key: 'manifest' },
      { ...good.manifest, kind: 'layer' },
      good.artifacts[0]?.artifact,
    ]) {
      await refused({ ...good, manifest: bad });
    }
    expect(errorKind(await catalog.publish({ ...good, manifest: other }))).toBe('upload-missing');
    value(await catalog.publish(good));
  });

  test('every number in the database is a whole one', async () => {
    if (dialect.name !== 'sqlite') return;
    await publishOne(catalog, { alias: 'typed' });
    const { sql } = await import('kysely');
    const { rows } = await catalog.database.read('types', (tx) =>
      sql<{ type: string }>`SELECT DISTINCT typeof(size_bytes) AS type FROM artifact
        UNION SELECT DISTINCT typeof(virtual_bytes) FROM layer
        UNION SELECT DISTINCT typeof(created_at_ms) FROM snapshot`.execute(tx.db),
    );
    expect(rows).toEqual([{ type: 'integer' }]);
  });
});

onEachDialect('statements', (dialect) => {
  test('a publish costs the same however long the chain below is', async () => {
    const log: string[] = [];
    const catalog = await openTest(dialect, { onStatement: ({ sql }) => log.push(sql) });
    value(await catalog.registerNode({ nodeId: NODE }));
    const counts = [];
    for (const depth of [1, 32, 254]) {
      const base = await publishOne(catalog, { layers: depth });
      const request = await prepare(catalog, { layers: 1, on: headOf(base) });
      const before = await rowCount(catalog);
      log.length = 0;
      value(await catalog.publish(request));
      const reads = log.filter((text) => /^select/i.test(text)).length;
      const statements = log.length;
      counts.push({ statements, reads, rows: (await rowCount(catalog)) - before });
    }
    expect(counts[1]).toEqual(counts[0]);
    expect(counts[2]).toEqual(counts[0]);
    // Of δ = 1, h = 1: layer, head, content, snapshot, vm-state's row; three objects for three
    // intents.
    expect(counts[0]?.rows).toBe(5);
    expect(counts[0]?.statements).toBeLessThanOrEqual(16);
    const many = await prepare(catalog, { layers: 100 });
    log.length = 0;
    value(await catalog.publish(many));
    expect(log.length).toBe(counts[0]?.statements);
    // A fork's hold: one row, one statement.
    const hold = { holdId: holdId('counted'), purpose: 'prepared' };
    const held = { ...(await prepare(catalog, { layers: 1 })), hold };
    const before = await rowCount(catalog);
    log.length = 0;
    value(await catalog.publish(held));
    expect(log.length).toBe((counts[0]?.statements ?? 0) + 1);
    expect((await rowCount(catalog)) - before).toBe((counts[0]?.rows ?? 0) + 1);
    await catalog.close();
  });
});

async function rowCount(catalog: OpenCatalog): Promise<number> {
  const tables = [
    'alias',
    'artifact',
    'content',
    'content_artifact',
    'content_head',
    'hold',
    'layer',
    'reclaim',
    'snapshot',
    'upload',
  ] as const;
  return await catalog.database.read('count', async (tx) => {
    let total = 0;
    for (const table of tables) {
      const query = tx.db.selectFrom(table).select((eb) => eb.fn.countAll<number>().as('count'));
      total += (await query.executeTakeFirstOrThrow()).count;
    }
    return total;
  });
}
