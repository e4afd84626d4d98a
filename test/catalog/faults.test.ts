/** What the database does to us: gone, locked, slow, full, in conflict. */
import { spawnSync } from 'node:child_process';
import { mkdtemp, rm, stat, writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import { setImmediate as immediate } from 'node:timers/promises';
import { sql } from 'kysely';
import pg from 'pg';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { FileArtifactStore } from '../../src/artifact/file-store.ts';
import { systemClock } from '../../src/clock.ts';
import type { Clock } from '../../src/clock.ts';
import type { StatementEvent, TransactionEvent } from '../../src/catalog/database.ts';
import { openCatalog } from '../../src/catalog/open.ts';
import { publish } from '../../src/catalog/publish.ts';
import { ReleaseFlusher } from '../../src/catalog/release-queue.ts';
import { Collector } from '../../src/gc/collector.ts';
import { GcSchedule } from '../../src/gc/schedule.ts';
import { err, ok } from '../../src/result.ts';
import { holdId } from '../../src/units.ts';
import type { HoldId } from '../../src/units.ts';
import { TestPostgres, fastFolder, postgresMissing } from '../../tools/postgres-server.ts';
import { NODE, errorKind, headOf, onEachDialect, openTest, patient } from './catalogs.ts';
import { prepare, publishOne, value } from './catalogs.ts';
import { lockedBy } from './locker.ts';

function promised(): { readonly promise: Promise<void>; readonly resolve: () => void } {
  let resolve: () => void = () => undefined;
  const promise = new Promise<void>((done) => {
    resolve = done;
  });
  return { promise, resolve };
}

/** What `NodeDb` does, without a disk. */
class Queue {
  readonly holds = new Set<HoldId>();
  pendingReleases(limit: number): { holdId: HoldId }[] {
    return [...this.holds].slice(0, limit).map((hold) => ({ holdId: hold }));
  }
  releaseTried() {
    return ok(undefined);
  }
  releaseDone(hold: HoldId) {
    this.holds.delete(hold);
    return ok(undefined);
  }
}

const missing = postgresMissing();
describe.skipIf(missing !== null)(`PostgreSQL faults ${missing ?? ''}`, () => {
  let server: TestPostgres;
  beforeAll(async () => {
    server = await TestPostgres.start();
    return () => server[Symbol.asyncDispose]();
  });

  const dialect = { name: 'postgres', newUrl: () => server.newDatabase() } as const;

  test('a release that a read-only server refuses stays queued, and goes once it can be written to', async () => {
    const url = await dialect.newUrl();
    const catalog = await openTest({ name: 'postgres', newUrl: () => Promise.resolve(url) });
    value(await catalog.registerNode({ nodeId: NODE }));
    const { contentId } = await publishOne(catalog);
    const id = holdId('owed');
    const target = { content: contentId };
    value(await catalog.hold({ holdId: id, nodeId: NODE, target, purpose: 'vm' }));
    const options = '-c default_transaction_read_only=off';
    const admin = new pg.Client({ connectionString: url, options });
    await admin.connect();
    /** As a failover does: what connects from now on finds it so, and all others lose their connection. */
    const setReadOnly = async (how: 'on' | 'off'): Promise<void> => {
      const name = new URL(url).pathname.slice(1);
      await admin.query(`ALTER DATABASE "${name}" SET default_transaction_read_only = ${how}`);
      await admin.query(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity
        WHERE datname = current_database() AND pid <> pg_backend_pid()`);
    };
    await setReadOnly('on');
    const [refused, released] = [promised(), promised()];
    const errors: string[] = [];
    const queue = new Queue();
    queue.holds.add(id);
    await using flusher = new ReleaseFlusher({
      catalog,
      store: {
        pendingReleases: (limit) => queue.pendingReleases(limit),
        releaseTried: () => queue.releaseTried(),
        releaseDone: (hold) => {
          released.resolve();
          return queue.releaseDone(hold);
        },
      },
      clock: systemClock,
      onError: ({ message }) => {
        errors.push(message);
        refused.resolve();
      },
    });
    flusher.start();
    await refused.promise;
    expect(errors[0]).toMatch(/read-only transaction.*25006/);
    await setReadOnly('off');
    flusher.poke();
    await released.promise;
    expect(value(await catalog.listHolds({}))).toEqual([]);
    await admin.end();
    await catalog.close();
  });

  test('a server that stops in mid-publish leaves nothing half there', async () => {
    if (!server.canRestart) return;
    const events: TransactionEvent[] = [];
    const onTransaction = (event: TransactionEvent): void => void events.push(event);
    const catalog = await openTest(dialect, { onTransaction });
    value(await catalog.registerNode({ nodeId: NODE }));
    const base = await publishOne(catalog);
    const request = await prepare(catalog, { on: headOf(base), alias: 'later' });
    const failing = catalog.database.write('test', async (tx) => {
      const published = await publish(tx, request);
      await server.down('immediate');
      return published;
    });
    await expect(failing).rejects.toMatchObject({ detail: { kind: 'catalog-unavailable' } });
    const queue = new Queue();
    queue.holds.add(holdId('owed'));
    const errors: string[] = [];
    const flusher = new ReleaseFlusher({
      catalog,
      store: queue,
      clock: systemClock,
      onError: ({ kind }) => errors.push(kind),
    });
    events.length = 0;
    expect(errorKind(await catalog.publish(request))).toBe('catalog-unavailable');
    expect(errorKind(await catalog.resolve(base.snapshotId))).toBe('catalog-unavailable');
    expect(await flusher.flush()).toBe(false);
    expect(errors).toEqual(['catalog-unavailable']);
    // They fail fast: each was tried once more, and no longer.
    expect(events.map(({ name, attempts }) => [name, attempts])).toEqual([
      ['publish', 2],
      ['resolve', 2],
      ['release', 2],
    ]);
    expect(queue.holds.size).toBe(1);
    await server.up();
    expect(errorKind(await catalog.show(request.snapshotId))).toBe('snapshot-missing');
    expect(value(await catalog.publish(request)).created).toBe(true);
    expect(value(await catalog.publish(request)).created).toBe(false);
    expect(value(await catalog.resolve('later')).snapshot.id).toBe(request.snapshotId);
    expect(await flusher.flush()).toBe(true);
    expect(queue.holds.size).toBe(0);
    await catalog.close();
  });

  test('connections that are killed inside transactions leave a pool that works', async () => {
    const url = await server.newDatabase();
    const catalog = value(await openCatalog({ url, poolMax: 2 }));
    value(await catalog.registerNode({ nodeId: NODE }));
    for (let count = 0; count < 20; count += 1) {
      const failing = catalog.database.write('test', async (tx) => {
        const { rows } = await sql<{ pid: number }>`SELECT pg_backend_pid() AS pid`.execute(tx.db);
        if (count % 2 === 0) throw new Error('own failure');
        await server.admin(`SELECT pg_terminate_backend(${String(rows[0]?.pid)})`);
        await sql`SELECT 1`.execute(tx.db);
      });
      await expect(failing).rejects.toThrow();
    }
    const answers = await Promise.all(Array.from({ length: 100 }, () => catalog.ping()));
    expect(answers.every(({ ok: isOk }) => isOk)).toBe(true);
    const connections = await server.admin(
      `SELECT 1 FROM pg_stat_activity WHERE application_name = 'varve' AND state = 'idle'`,
    );
    expect(connections.length).toBeLessThanOrEqual(2);
    await publishOne(catalog);
    await catalog.close();
  });

  test('of two transactions in a deadlock one runs again, and both succeed', async () => {
    const events: TransactionEvent[] = [];
    const catalog = await openTest(dialect, { onTransaction: (event) => events.push(event) });
    value(await catalog.registerNode({ nodeId: NODE }));
    const [one, two] = [await publishOne(catalog), await publishOne(catalog)];
    const reached = [promised(), promised()] as const;
    const lock = async (first: string, second: string, own: 0 | 1): Promise<void> => {
      await catalog.database.write('deadlock', async (tx) => {
        await sql`SELECT 1 FROM snapshot WHERE id = ${first} FOR UPDATE`.execute(tx.db);
        reached[own].resolve();
        await reached[own === 0 ? 1 : 0].promise;
        await sql`SELECT 1 FROM snapshot WHERE id = ${second} FOR UPDATE`.execute(tx.db);
      });
    };
    await Promise.all([
      lock(one.snapshotId, two.snapshotId, 0),
      lock(two.snapshotId, one.snapshotId, 1),
    ]);
    const attempts = events
      .filter(({ name }) => name === 'deadlock')
      .map((event) => event.attempts);
    expect(attempts.sort()).toEqual([1, 2]);
    await catalog.close();
  });

  test('a serialization failure runs the whole transaction again', async () => {
    const catalog = await openTest(dialect);
    let attempts = 0;
    const answer = await catalog.database.write('test', async (tx) => {
      attempts += 1;
      await sql`INSERT INTO node (id, registered_at_ms) VALUES ('n', 1)`.execute(tx.db);
      if (attempts < 3) {
        await sql`DO $$ BEGIN RAISE EXCEPTION 'conflict' USING ERRCODE = '40001'; END $$`.execute(
          tx.db,
        );
      }
      return 'done';
    });
    expect([answer, attempts]).toEqual(['done', 3]);
    expect(value(await catalog.listNodes())).toHaveLength(1);
    await catalog.close();
  });

  test('a statement that takes too long fails as catalog-timeout', async () => {
    const catalog = await openTest(dialect, { statementTimeoutMs: 200 });
    const slow = catalog.database.read('test', (tx) => sql`SELECT pg_sleep(30)`.execute(tx.db));
    await expect(slow).rejects.toMatchObject({ detail: { kind: 'catalog-timeout' } });
    value(await catalog.ping());
    await catalog.close();
  });

  test('a database that is not there, or no server, is a clear error', async () => {
    expect(errorKind(await openCatalog({ url: server.url('nowhere') }))).toBe(
      'catalog-unavailable',
    );
    const nobody = 'postgres://varve@localhost/varve?host=/nonexistent';
    expect(errorKind(await openCatalog({ url: nobody }))).toBe('catalog-unavailable');
  });
});

const pathOf = (url: string): string => url.slice('sqlite:'.length);

describe('SQLite faults', () => {
  const folders: string[] = [];
  afterAll(() => Promise.all(folders.map((path) => rm(path, { recursive: true, force: true }))));
  const dialect = {
    name: 'sqlite',
    newUrl: async () => {
      const folder = await mkdtemp(join(fastFolder, 'varve-faults-'));
      folders.push(folder);
      return `sqlite:${join(folder, 'catalog.db')}`;
    },
  } as const;

  test('a lock that another process holds for 4 s delays writes only, never the event loop', async () => {
    const url = await dialect.newUrl();
    let refused = 0;
    const onStatement = ({ sql: text, failed }: StatementEvent): void => {
      if (failed && text === 'begin immediate') refused += 1;
    };
    const catalog = value(await openCatalog({ ...patient, url, onStatement }));
    value(await catalog.registerNode({ nodeId: NODE }));
    const request = await prepare(catalog);
    await using other = await lockedBy(pathOf(url), { holdMs: 4000 });
    let published = false;
    const publishing = catalog.publish(request).finally(() => (published = true));
    const seen = { heldLong: false, reads: 0 };
    void other.held.then(() => (seen.heldLong = true));
    // Each read comes back while the publish is turned away again and again.
    while (!seen.heldLong || seen.reads < 60 || refused < 20) {
      value(await catalog.ping());
      seen.reads += 1;
      await immediate();
    }
    expect(published).toBe(false);
    await other.end();
    expect(value(await publishing).created).toBe(true);
    await catalog.close();
  });

  test('opening a catalog that another process locks waits without the event loop', async () => {
    const url = await dialect.newUrl();
    const other = await lockedBy(pathOf(url), {
      begin: 'BEGIN EXCLUSIVE; CREATE TABLE t (n INTEGER)',
    });
    let slept = 0;
    const enough = promised();
    const clock: Clock = {
      ...systemClock,
      sleep: (ms, signal) => {
        slept += 1;
        if (slept === 20) enough.resolve();
        return systemClock.sleep(ms, signal);
      },
    };
    const opening = openCatalog({ ...patient, url, clock });
    await enough.promise;
    await other.end();
    await value(await opening).close();
  });

  test('a lock held for longer than the limit is catalog-busy', async () => {
    const url = await dialect.newUrl();
    const catalog = value(await openCatalog({ url, lockTimeoutMs: 200 }));
    const other = await lockedBy(pathOf(url));
    expect(errorKind(await catalog.registerNode({ nodeId: NODE }))).toBe('catalog-busy');
    await other.end();
    value(await catalog.registerNode({ nodeId: NODE }));
    await catalog.close();
  });

  test('a file that is no database is a clear error', async () => {
    const url = await dialect.newUrl();
    const path = pathOf(url);
    await writeFile(path, 'these are not the bytes of a database at all'.repeat(200));
    expect(errorKind(await openCatalog({ url }))).toBe('catalog-corrupt');
    expect(errorKind(await openCatalog({ url: `sqlite:${path}/below/catalog.db` }))).toBe(
      'catalog-unavailable',
    );
    expect(errorKind(await openCatalog({ url: 'mysql://localhost/x' }))).toBe(
      'catalog-unavailable',
    );
  });

  test('the write-ahead log stays small while pages are read and rows written', async () => {
    const url = await dialect.newUrl();
    const catalog = value(await openCatalog({ url }));
    value(await catalog.registerNode({ nodeId: NODE }));
    for (let count = 0; count < 30; count += 1) await publishOne(catalog);
    let cursor: string | undefined;
    for (let count = 0; count < 600; count += 1) {
      const page = value(await catalog.list({ cursor, limit: 3 }));
      cursor = page.nextCursor ?? undefined;
      value(await catalog.releaseMany([holdId(`wal-${count}-a`), holdId(`wal-${count}-b`)]));
    }
    const wal = await stat(`${pathOf(url)}-wal`);
    expect(wal.size).toBeLessThan(8 * 2 ** 20);
    await catalog.close();
  });

  const mount = spawnSync('sh', ['-c', 'd=$(mktemp -d) && mount -t tmpfs none $d && umount $d']);
  const unmountable = mount.status === 0 ? '' : ': skipped, this machine lets nobody mount a tmpfs';

  test.skipIf(mount.status !== 0)(
    `a full disk${unmountable} refuses publishes, and collecting empties it`,
    async () => {
      const folder = await mkdtemp(join(fastFolder, 'varve-full-'));
      folders.push(folder);
      expect(spawnSync('mount', ['-t', 'tmpfs', '-o', 'size=16m', 'none', folder]).status).toBe(0);
      try {
        const catalog = value(await openCatalog({ url: `sqlite:${join(folder, 'catalog.db')}` }));
        const store = value(
          await FileArtifactStore.open({ root: join(folder, 'store'), node: NODE }),
        );
        value(await catalog.registerNode({ nodeId: NODE }));
        const made = [];
        for (let count = 0; count < 20; count += 1) made.push(await publishOne(catalog));
        for (const { snapshotId } of made) value(await catalog.retire(snapshotId));
        spawnSync('dd', ['if=/dev/zero', `of=${join(folder, 'filler')}`, 'bs=64k']);
        spawnSync('dd', ['if=/dev/zero', `of=${join(folder, 'filler2')}`, 'bs=512']);
        let refusals = 0;
        for (let count = 0; count < 400 && refusals === 0; count += 1) {
          const refused = await catalog.releaseMany(
            Array.from({ length: 50 }, (_, index) => holdId(`full-${count}-${index}`)),
          );
          if (!refused.ok) {
            expect(refused.error.kind).toBe('catalog-full');
            refusals += 1;
          }
        }
        expect(refusals).toBe(1);
        const signal = new AbortController().signal;
        const collector = new Collector({ database: catalog.database, store, name: 'test' });
        expect(value(await collector.run({}, signal))).toMatchObject({ layersCondemned: 20 });
        await rm(join(folder, 'filler'));
        await publishOne(catalog);
        await catalog.close();
      } finally {
        spawnSync('umount', ['-l', folder]);
      }
    },
  );
});

onEachDialect('the release queue', (dialect) => {
  test('releases leave the queue only once the catalog has done them', async () => {
    const catalog = await openTest(dialect);
    value(await catalog.registerNode({ nodeId: NODE }));
    const { contentId } = await publishOne(catalog);
    const queue = new Queue();
    for (let count = 0; count < 450; count += 1) {
      const id = holdId(`queued-${count}`);
      if (count % 50 === 0) {
        const target = { content: contentId };
        value(await catalog.hold({ holdId: id, nodeId: NODE, target, purpose: 'vm' }));
      }
      queue.holds.add(id);
    }
    const errors: string[] = [];
    const flusher = new ReleaseFlusher({
      catalog,
      store: queue,
      clock: systemClock,
      onError: ({ kind }) => errors.push(kind),
    });
    expect(await flusher.flush()).toBe(true);
    expect(queue.holds.size).toBe(0);
    expect(value(await catalog.listHolds({}))).toEqual([]);
    // An id that the catalog can never take does not keep the others.
    queue.holds.add(holdId('../bad'));
    queue.holds.add(holdId('good'));
    expect(await flusher.flush()).toBe(false);
    expect([...queue.holds]).toEqual(['../bad']);
    expect(errors).toEqual(['request-invalid']);
    await catalog.close();
  });
});

onEachDialect('Statements', (dialect) => {
  test('one that does not fit the schema fails as the catalog’s own error, not as a bug', async () => {
    const catalog = await openTest(dialect);
    const failing = catalog.database.read('test', ({ db }) =>
      sql`SELECT * FROM nowhere`.execute(db),
    );
    await expect(failing).rejects.toMatchObject({ detail: { kind: 'catalog-corrupt' } });
    await catalog.close();
  });
});

test('a release queue that throws is told of, and asked again', async () => {
  const [told, asked] = [promised(), promised()];
  let asks = 0;
  const store = {
    pendingReleases: () => {
      asks += 1;
      if (asks === 1) throw new Error('a bug');
      asked.resolve();
      return [];
    },
    releaseTried: () => ok(undefined),
    releaseDone: () => ok(undefined),
  };
  const errors: string[] = [];
  await using flusher = new ReleaseFlusher({
    catalog: { releaseMany: () => Promise.resolve(ok(undefined)) },
    store,
    clock: systemClock,
    onError: ({ message }) => {
      errors.push(message);
      told.resolve();
    },
  });
  flusher.start();
  await told.promise;
  flusher.poke();
  await asked.promise;
  expect(errors).toEqual(['Error: a bug']);
});

test('a scheduled collection that throws is told of, and the next one comes', async () => {
  const [first, second] = [promised(), promised()];
  const stopped = err({ kind: 'cancelled', message: 'stopped' } as const);
  let runs = 0;
  const run: Collector['run'] = () => {
    runs += 1;
    return runs === 1 ? Promise.reject(new Error('a bug')) : Promise.resolve(stopped);
  };
  const told: string[] = [];
  await using schedule = new GcSchedule({
    collector: { run },
    clock: systemClock,
    onRun: (result) => {
      if (!result.ok) told.push(result.error.message);
      (told.length === 1 ? first : second).resolve();
    },
  });
  schedule.start(1);
  await first.promise;
  await second.promise;
  expect(told.slice(0, 2)).toEqual(['Error: a bug', 'stopped']);
});
