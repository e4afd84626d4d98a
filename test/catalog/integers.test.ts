/** Integers beyond 2^53, which a number cannot hold: exact, or refused alike on every dialect. */
import { sql } from 'kysely';
import { expect, test } from 'vitest';
import { Collector } from '../../src/gc/collector.ts';
import { bytes } from '../../src/units.ts';
import { NODE, onEachDialect, upload, value } from './catalogs.ts';
import { World, signal } from '../gc/world.ts';

onEachDialect('integers', (dialect) => {
  async function withUploads(): Promise<World> {
    const world = await World.open(dialect, { inMemory: true });
    const artifacts = [1, 2, 3].map(() => ({
      ...upload(),
      sizeBytes: bytes(Number.MAX_SAFE_INTEGER),
    }));
    value(await world.catalog.recordUpload({ nodeId: NODE, artifacts }));
    value(await world.catalog.abandonUploads(NODE, []));
    return world;
  }

  test('sizes whose sum no number holds are summed exactly', async () => {
    await using world = await withUploads();
    const { database } = world.catalog;
    const collector = new Collector({ database, store: world.store, name: 'test' });
    const { backlog } = value(await collector.plan(signal));
    expect(backlog).toEqual({ objects: 3, bytes: '27021597764222973' });
    const top = '9223372036854775807';
    await database.write('test', ({ db }) =>
      sql`UPDATE reclaim SET size_bytes = ${sql.raw(top)}`.execute(db),
    );
    const most = value(await collector.plan(signal)).backlog;
    expect(most.bytes).toBe((3n * BigInt(top)).toString());
  });

  test('a run that reclaims more than a number holds is recorded as the most that one does', async () => {
    await using world = await withUploads();
    const { database } = world.catalog;
    const collector = new Collector({ database, store: world.store, name: 'test' });
    const report = value(await collector.run({ force: true }, signal));
    expect(report).toMatchObject({ objectsReclaimed: 3, bytesReclaimed: Number.MAX_SAFE_INTEGER });
    const [run] = value(await collector.runs(1));
    expect(run?.bytesReclaimed).toBe(Number.MAX_SAFE_INTEGER);
  });

  test('an integer that no number holds is refused with its own kind, and the next read goes on', async () => {
    await using world = await withUploads();
    const { database } = world.catalog;
    const sizes = () =>
      database.read('test', ({ db }) => db.selectFrom('reclaim').select('size_bytes').execute());
    expect((await sizes())[0]?.size_bytes).toBe(Number.MAX_SAFE_INTEGER);
    for (const beyond of ['9007199254740992', '9007199254740993', '9223372036854775807']) {
      await database.write('test', ({ db }) =>
        sql`UPDATE reclaim SET size_bytes = ${sql.raw(beyond)}`.execute(db),
      );
      await expect(sizes()).rejects.toMatchObject({
        detail: { kind: 'catalog-integer', message: expect.stringContaining(beyond) as string },
      });
    }
    await database.write('test', ({ db }) => sql`UPDATE reclaim SET size_bytes = 5`.execute(db));
    expect((await sizes())[2]?.size_bytes).toBe(5);
  });
});
