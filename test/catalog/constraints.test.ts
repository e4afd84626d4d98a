/** What the database itself refuses, whatever a program asks of it. */
import { sql } from 'kysely';
import type { RawBuilder } from 'kysely';
import { expect, test } from 'vitest';
import { holdId } from '../../src/units.ts';
import { NODE, headOf, onEachDialect, openTest, publishOne, uuid, value } from './catalogs.ts';

onEachDialect('the database', (dialect) => {
  test('refuses to delete what something needs, and to need what is not there', async () => {
    const catalog = await openTest(dialect);
    value(await catalog.registerNode({ nodeId: NODE }));
    const base = await publishOne(catalog);
    const top = await publishOne(catalog, { on: headOf(base), alias: 'top' });
    // Nothing but the layer above needs this one any more.
    await catalog.database.write('test', (tx) =>
      sql`DELETE FROM content_head WHERE layer_uuid = ${headOf(base)}`.execute(tx.db),
    );
    const target = { content: top.contentId };
    value(await catalog.hold({ holdId: holdId('h'), nodeId: NODE, target, purpose: 'vm' }));
    value(await catalog.createVolume({ id: 'v', contentId: top.contentId }));
    const [layer] = base.layers;
    const statements: Record<string, RawBuilder<unknown>> = {
      'a layer below another': sql`DELETE FROM layer WHERE uuid = ${headOf(base)}`,
      'a layer that is a head': sql`DELETE FROM layer WHERE uuid = ${headOf(top)}`,
      "a layer's object": sql`DELETE FROM artifact WHERE key = ${layer?.artifact.key}`,
      'a manifest': sql`DELETE FROM artifact WHERE key = ${top.manifest.key}`,
      'a VM state': sql`DELETE FROM artifact WHERE key = ${top.artifacts[0]?.artifact.key}`,
      'a claimed content': sql`DELETE FROM content WHERE id = ${top.contentId}`,
      'a named snapshot': sql`DELETE FROM snapshot WHERE id = ${top.snapshotId}`,
      'a node': sql`DELETE FROM node WHERE id = ${NODE}`,
      'no such layer below': sql`UPDATE layer SET predecessor = ${uuid()}
        WHERE uuid = ${headOf(top)}`,
      'no such content held': sql`UPDATE hold SET content_id = 'none' WHERE id = 'h'`,
      'no such backing': sql`UPDATE volume SET content_id = 'none' WHERE id = 'v'`,
      'no such content shown': sql`UPDATE snapshot SET content_id = 'none'
        WHERE id = ${top.snapshotId}`,
    };
    for (const [what, statement] of Object.entries(statements)) {
      const attempt = catalog.database.write('test', (tx) => statement.execute(tx.db));
      await expect(attempt, what).rejects.toMatchObject({ detail: { kind: 'catalog-corrupt' } });
    }
    expect(value(await catalog.lineage(headOf(top)))).toHaveLength(2);
    await catalog.close();
  });
});
