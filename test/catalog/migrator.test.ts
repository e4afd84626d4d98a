import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { sql } from 'kysely';
import { expect, test } from 'vitest';
import { migrations } from '../../migrations/index.ts';
import type { Migration } from '../../migrations/index.ts';
import { migrate, migrationStatus } from '../../src/catalog/migrator.ts';
import { openCatalog, openDatabase } from '../../src/catalog/open.ts';
import { errorKind, onEachDialect, openTest, value } from './catalogs.ts';

const allIds = migrations.map(({ id }) => id);
const dist = new URL('../../dist/', import.meta.url).href;

/**
 * Migrates when told to, and dies inside the migration it was given. Runs what `npm run build:ts`
 * made.
 */
const script = `
  const { migrations } = await import('${dist}migrations/index.js');
  const { migrate } = await import('${dist}src/catalog/migrator.js');
  const { openDatabase } = await import('${dist}src/catalog/open.js');
  const [url, dieIn] = process.argv.slice(1);
  const dying = (up) => function* (types) {
    yield up(types)[0];
    process.kill(process.pid, 'SIGKILL');
  };
  const list = migrations.map((m) => (m.id === dieIn ? { ...m, up: dying(m.up) } : m));
  process.once('message', async () => {
    let answer;
    try {
      const database = await openDatabase({ url, lockTimeoutMs: 60_000 });
      answer = JSON.stringify(await migrate(database, list));
      await database.close();
    } catch (error) {
      answer = 'error ' + error.stack;
    }
    process.send(answer, () => process.disconnect());
  });
  process.send('ready');
`;

/** Starts such a process; resolves when it is ready to be told. */
async function migrator(url: string, dieIn = ''): Promise<{ go(): Promise<string> }> {
  const child = spawn(process.execPath, ['--input-type=module', '-e', script, url, dieIn], {
    stdio: ['ignore', 'inherit', 'inherit', 'ipc'],
  });
  await once(child, 'message');
  return {
    go: async () => {
      const told: string[] = [];
      child.on('message', (message) => told.push(JSON.stringify(message)));
      child.send('go');
      await once(child, 'exit');
      return JSON.parse(told.at(-1) ?? '"killed"') as string;
    },
  };
}

onEachDialect('migrating', (dialect) => {
  test('a fresh database gets every migration, once', async () => {
    const catalog = await openTest(dialect);
    const status = await migrationStatus(catalog.database, migrations);
    expect([...status.applied].sort()).toEqual(allIds);
    expect(status.pending).toEqual([]);
    expect(await migrate(catalog.database, migrations)).toEqual([]);
    await catalog.close();
  });

  test('a database of every earlier release is brought up to date, with its rows', async () => {
    for (let count = 1; count < migrations.length; count += 1) {
      const url = await dialect.newUrl();
      const old = value(await openCatalog({ url, migrationList: migrations.slice(0, count) }));
      await old.database.write('test', (tx) =>
        sql`INSERT INTO node (id, registered_at_ms) VALUES ('old', 1)`.execute(tx.db),
      );
      await old.close();
      expect(errorKind(await openCatalog({ url, migrations: 'check' }))).toBe('catalog-older');
      const catalog = value(await openCatalog({ url }));
      expect(value(await catalog.listNodes()).map(({ id }) => id)).toEqual(['old']);
      await catalog.close();
    }
  });

  test('a database of a newer program is refused unless its change is harmless', async () => {
    const url = await dialect.newUrl();
    const step = (id: string, breaking: boolean): Migration => ({
      id,
      breaking,
      up: ({ int8 }) => [`CREATE TABLE t_${id.slice(0, 4)} (n ${int8})`],
    });
    const harmless = [...migrations, step('9001-add', false)];
    await value(await openCatalog({ url, migrationList: harmless })).close();
    const catalog = value(await openCatalog({ url }));
    const status = await migrationStatus(catalog.database, migrations);
    expect(status.newer).toEqual([{ id: '9001-add', breaking: false }]);
    await catalog.close();
    const newer = [...harmless, step('9002-change', true)];
    await value(await openCatalog({ url, migrationList: newer })).close();
    for (const mode of ['apply', 'check'] as const) {
      const refused = await openCatalog({ url, migrations: mode });
      expect(errorKind(refused)).toBe('catalog-newer');
      expect(!refused.ok && refused.error.message).toContain('9002-change');
    }
  });

  test('a migration that fails half-way leaves nothing of itself', async () => {
    const url = await dialect.newUrl();
    const broken: Migration = {
      id: '9001-broken',
      breaking: true,
      up: ({ int8 }) => [`CREATE TABLE half (n ${int8})`, 'INSERT INTO nowhere VALUES (1)'],
    };
    const opened = await openCatalog({ url, migrationList: [...migrations, broken] });
    expect(errorKind(opened)).toBe('catalog-corrupt');
    const database = await openDatabase({ url });
    const status = await migrationStatus(database, migrations);
    expect([...status.applied].sort()).toEqual(allIds);
    expect(status.newer).toEqual([]);
    await expect(
      database.write('test', (tx) => sql`SELECT * FROM half`.execute(tx.db)),
    ).rejects.toThrow();
    await database.close();
  });

  test('twenty processes that start at once apply each migration once', async () => {
    const url = await dialect.newUrl();
    const processes = await Promise.all(Array.from({ length: 20 }, () => migrator(url)));
    const outcomes = await Promise.all(processes.map((process) => process.go()));
    expect(outcomes.filter((outcome) => outcome.startsWith('error'))).toEqual([]);
    const applied = outcomes.flatMap((outcome) => JSON.parse(outcome) as string[]);
    expect(applied.sort()).toEqual(allIds);
  }, 240_000);

  test('a process killed inside a migration leaves whole migrations', async () => {
    const url = await dialect.newUrl();
    expect(await (await migrator(url, '0002-create-snapshot')).go()).toBe('killed');
    const database = await openDatabase({ url });
    const status = await migrationStatus(database, migrations);
    expect(status.applied).toEqual(['0001-create-layer']);
    expect(await migrate(database, migrations)).toEqual(allIds.slice(1));
    await database.close();
  });
});
