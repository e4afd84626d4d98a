/** A catalog that is away when it is wanted, or goes away, and what its daemon sees of that. */
import { once } from 'node:events';
import { mkdtemp, rm, writeFile } from 'node:fs/promises';
import { createServer, type Socket } from 'node:net';
import { join } from 'node:path';
import { SqliteError } from 'better-sqlite3';
import { sql } from 'kysely';
import { afterAll, beforeAll, describe, expect, onTestFinished, test } from 'vitest';
import { systemClock, type Clock } from '../../src/clock.ts';
import type { TransactionEvent } from '../../src/catalog/database.ts';
import { openCatalog, openCurrent, openDatabase } from '../../src/catalog/open.ts';
import type { CatalogConfig, OpenCatalog } from '../../src/catalog/open.ts';
import { ReopeningDatabase, reopeningCatalog } from '../../src/catalog/reopening.ts';
import type { ReopeningCatalog } from '../../src/catalog/reopening.ts';
import { TestPostgres, fastFolder, postgresMissing } from '../../tools/postgres-server.ts';
import { NODE, errorKind, onEachDialect, patient, publishOne, value } from './catalogs.ts';
import { lockedBy } from './locker.ts';
import { Network } from './network.ts';

/** What was told, in order, and what is awaited of it. */
class Told {
  readonly all: string[] = [];
  #waiters: (() => void)[] = [];

  tell(what: string): void {
    this.all.push(what);
    for (const wake of this.#waiters.splice(0)) wake();
  }

  /** Until so much has been told. */
  async count(count: number): Promise<readonly string[]> {
    while (this.all.length < count) {
      await new Promise<void>((resolve) => this.#waiters.push(resolve));
    }
    return this.all;
  }
}

function reopening(
  url: string,
  config: Partial<CatalogConfig> = {},
): ReopeningCatalog & { readonly told: Told } {
  const told = new Told();
  const made = reopeningCatalog(
    { ...patient, connectTimeoutMs: 600_000, url, ...config },
    {
      nodeId: NODE,
      onOpen: () => told.tell('open'),
      onAway: ({ kind }) => told.tell(kind),
      onForgotten: ({ kind }) => told.tell(kind),
    },
  );
  return { ...made, told };
}

const statement = (catalog: OpenCatalog, text: string) =>
  catalog.database.write('test', (tx) => sql.raw(text).execute(tx.db));

const nodesOf = async ({ catalog }: ReopeningCatalog) =>
  value(await catalog.listNodes()).map(({ id }) => id);

onEachDialect('a catalog that is there', (dialect) => {
  test('is asked while it is being opened, and has the node registered', async () => {
    const made = reopening(await dialect.newUrl());
    // Before the first try has ended: the question waits for it.
    expect(await nodesOf(made)).toEqual([NODE]);
    value(await made.firstTry);
    expect(made.catalog.dialect).toBe(dialect.name);
    const { snapshotId } = await publishOne(made.catalog);
    expect(value(await made.catalog.resolve(snapshotId)).snapshot.nodeId).toBe(NODE);
    await made.catalog.close();
    expect(errorKind(await made.catalog.ping())).toBe('catalog-closed');
    expect(made.told.all).toEqual(['open']);
  });

  test('of a newer program says so in every answer, until it is not any more', async () => {
    const url = await dialect.newUrl();
    const other = value(await openCatalog({ ...patient, url }));
    const newer = `INSERT INTO migration (id, breaking, applied_at_ms) VALUES ('9999-new', 1, 1)`;
    await statement(other, newer);
    const made = reopening(url);
    expect(errorKind(await made.firstTry)).toBe('catalog-newer');
    expect(errorKind(await made.catalog.ping())).toBe('catalog-newer');
    expect(errorKind(await made.catalog.listHolds({}))).toBe('catalog-newer');
    await statement(other, `DELETE FROM migration WHERE id = '9999-new'`);
    expect(await made.told.count(2)).toEqual(['catalog-newer', 'open']);
    expect(await nodesOf(made)).toEqual([NODE]);
    await made.catalog.close();
    await other.close();
  });

  test('answers a forgotten node what does not name it', async () => {
    const url = await dialect.newUrl();
    const other = value(await openCatalog({ ...patient, url }));
    value(await other.registerNode({ nodeId: NODE }));
    value(await other.forgetNode(NODE));
    const made = reopening(url);
    expect(errorKind(await made.firstTry)).toBe('node-forgotten');
    expect(made.told.all).toEqual(['node-forgotten', 'open']);
    value(await made.catalog.ping());
    const refused = await made.catalog.recordUpload({ nodeId: NODE, artifacts: [] });
    expect(errorKind(refused)).toBe('request-invalid');
    await expect(publishOne(made.catalog)).rejects.toThrow('node-forgotten');
    await made.catalog.close();
    await other.close();
  });
});

const nobody = 'postgres://varve@localhost/varve?host=/nonexistent';

test('one try at a time, after growing waits, and none after it was closed', async () => {
  const waits: number[] = [];
  const away: string[] = [];
  const running = { now: 0, most: 0, all: 0 };
  let enough: () => void = () => undefined;
  const waited = new Promise<void>((resolve) => (enough = resolve));
  const clock: Clock = {
    ...systemClock,
    sleep: async (ms, signal) => {
      waits.push(ms);
      if (waits.length < 8) return;
      enough();
      await systemClock.sleep(600_000, signal);
    },
  };
  const database = new ReopeningDatabase({
    clock,
    random: () => 0,
    open: async () => {
      running.all += 1;
      running.now += 1;
      running.most = Math.max(running.most, running.now);
      try {
        return await openCurrent({ url: nobody });
      } finally {
        running.now -= 1;
      }
    },
    onOpen: () => undefined,
    onAway: ({ kind }) => away.push(kind),
  });
  await waited;
  await database.close();
  expect(waits).toEqual([200, 400, 800, 1600, 3200, 5000, 5000, 5000]);
  expect(running).toEqual({ now: 0, most: 1, all: 8 });
  // One reason, told once.
  expect(away).toEqual(['catalog-unavailable']);
  const asked = database.read('test', () => Promise.resolve());
  await expect(asked).rejects.toMatchObject({ detail: { kind: 'catalog-closed' } });
});

test('a server that takes connections and says nothing is away, and is not waited for again', async () => {
  const folder = await mkdtemp(join(fastFolder, 'varve-silent-'));
  onTestFinished(() => rm(folder, { recursive: true, force: true }));
  const taken = new Set<Socket>();
  const silent = createServer((socket) => taken.add(socket.on('error', () => undefined)));
  silent.listen(join(folder, '.s.PGSQL.5432'));
  await once(silent, 'listening');
  const url = `postgres://varve@localhost/varve?host=${folder}`;
  // It sleeps for ever after the first try: nothing but that try connects.
  const clock: Clock = {
    ...systemClock,
    sleep: (ms, signal) => systemClock.sleep(ms >= 100 ? 600_000 : ms, signal),
  };
  const transactions: string[] = [];
  const onTransaction = ({ name }: TransactionEvent): void => void transactions.push(name);
  const made = reopening(url, { connectTimeoutMs: 200, clock, onTransaction });
  const waiting = made.catalog.ping();
  expect(errorKind(await made.firstTry)).toBe('catalog-unavailable');
  expect(errorKind(await waiting)).toBe('catalog-unavailable');
  for (let count = 0; count < 100; count += 1) {
    expect(errorKind(await made.catalog.ping())).toBe('catalog-unavailable');
  }
  expect(transactions).toEqual(['migration-status']);
  await made.catalog.close();
  for (const socket of taken) socket.destroy();
  silent.close();
});

/** Waits for a server's answer are over at once when it is known that none comes. */
const silence = {
  statementTimeoutMs: 1_000_000,
  clockOf: (isSilent: () => boolean): Clock => ({
    ...systemClock,
    sleep: (ms, signal) =>
      ms >= 100_000 && isSilent() ? Promise.resolve() : systemClock.sleep(ms, signal),
  }),
};

test('a server that lets clients in and goes silent is away, and asked on new connections', async () => {
  await using network = await Network.before(null);
  const database = await openDatabase({
    ...{ url: network.url, connectTimeoutMs: 600_000, lockTimeoutMs: 600_000 },
    ...{ statementTimeoutMs: silence.statementTimeoutMs, clock: silence.clockOf(() => true) },
  });
  for (let count = 0; count < 3; count += 1) {
    const asked = database.read('test', (tx) => sql`SELECT 1`.execute(tx.db));
    await expect(asked).rejects.toMatchObject({
      detail: {
        kind: 'catalog-unavailable',
        message: 'PostgreSQL: no answer from the server within 1600000 ms',
      },
    });
  }
  // Each is tried twice, and never on a connection that still owes an answer.
  expect(network.taken).toHaveLength(6);
  await database.close();
  await network.closed();
});

test('a URL that names no catalog is refused at once', () => {
  expect(() => reopening('mysql://localhost/x')).toThrow('neither sqlite:/path nor postgres://');
});

describe('an SQLite catalog', () => {
  const folders: string[] = [];
  afterAll(() => Promise.all(folders.map((path) => rm(path, { recursive: true, force: true }))));
  const newFolder = async (): Promise<string> => {
    const folder = await mkdtemp(join(fastFolder, 'varve-reopening-'));
    folders.push(folder);
    return folder;
  };

  test('whose folder cannot be made yet is opened once it can', async () => {
    const inTheWay = join(await newFolder(), 'mount');
    await writeFile(inTheWay, 'no folder');
    const made = reopening(`sqlite:${inTheWay}/catalog.db`);
    expect(errorKind(await made.firstTry)).toBe('catalog-unavailable');
    expect(errorKind(await made.catalog.list({}))).toBe('catalog-unavailable');
    await rm(inTheWay);
    expect(await made.told.count(2)).toEqual(['catalog-unavailable', 'open']);
    expect(await nodesOf(made)).toEqual([NODE]);
    await made.catalog.close();
  });

  /** As the driver throws it out of a statement. */
  const failWith = ({ catalog }: ReopeningCatalog, code: string) =>
    catalog.database.read('failing', () => Promise.reject(new SqliteError('failed', code)));

  test('that is lost is waited for by whoever asks meanwhile, at whatever moment', async () => {
    const made = reopening(`sqlite:${join(await newFolder(), 'catalog.db')}`);
    value(await made.firstTry);
    const failing = expect(failWith(made, 'SQLITE_CANTOPEN')).rejects.toMatchObject({
      detail: { kind: 'catalog-unavailable' },
    });
    const asked = [];
    // One at every step that the failing one takes, and many after it.
    for (let step = 0; step < 500; step += 1) {
      asked.push(made.catalog.ping());
      await Promise.resolve();
    }
    await failing;
    for (const answer of await Promise.all(asked)) value(answer);
    expect(made.told.all).toEqual(['open', 'open']);
    await made.catalog.close();
  });

  test('whose file answers with an I/O error is opened anew', async () => {
    const made = reopening(`sqlite:${join(await newFolder(), 'catalog.db')}`);
    value(await made.firstTry);
    await expect(failWith(made, 'SQLITE_IOERR_READ')).rejects.toMatchObject({
      detail: { kind: 'catalog-io' },
    });
    value(await made.catalog.ping());
    expect(made.told.all).toEqual(['open', 'open']);
    // A statement that does not fit is no reason to.
    await expect(failWith(made, 'SQLITE_ERROR')).rejects.toMatchObject({
      detail: { kind: 'catalog-corrupt' },
    });
    value(await made.catalog.ping());
    expect(made.told.all).toEqual(['open', 'open']);
    await made.catalog.close();
  });

  test('locked by another process is busy, and opened once it is not', async () => {
    const path = join(await newFolder(), 'catalog.db');
    await using other = await lockedBy(path);
    const made = reopening(`sqlite:${path}`, { lockTimeoutMs: 100 });
    expect(errorKind(await made.firstTry)).toBe('catalog-busy');
    expect(errorKind(await made.catalog.ping())).toBe('catalog-busy');
    await other.end();
    expect(await made.told.count(2)).toEqual(['catalog-busy', 'open']);
    expect(await nodesOf(made)).toEqual([NODE]);
    await made.catalog.close();
  });

  test('that has all it needs is opened while another process writes', async () => {
    const path = join(await newFolder(), 'catalog.db');
    const before = reopening(`sqlite:${path}`);
    value(await before.firstTry);
    await before.catalog.close();
    await using other = await lockedBy(path);
    const made = reopening(`sqlite:${path}`);
    value(await made.firstTry);
    expect(await nodesOf(made)).toEqual([NODE]);
    await other.end();
    await made.catalog.close();
  });
});

const missing = postgresMissing();
describe.skipIf(missing !== null)(`a PostgreSQL catalog ${missing ?? ''}`, () => {
  let server: TestPostgres;
  beforeAll(async () => {
    server = await TestPostgres.start();
    return () => server[Symbol.asyncDispose]();
  });

  test('whose server is down at first, and later again, is there whenever the server is', async () => {
    if (!server.canRestart) return;
    const url = await server.newDatabase();
    await server.down();
    const made = reopening(url);
    expect(errorKind(await made.firstTry)).toBe('catalog-unavailable');
    expect(errorKind(await made.catalog.list({}))).toBe('catalog-unavailable');
    await server.up();
    expect(await made.told.count(2)).toEqual(['catalog-unavailable', 'open']);
    // What comes back is an older copy, in which the node is not registered.
    await server.admin('DELETE FROM node', url);
    await server.down('immediate');
    // Many find it lost at once, and it is opened once.
    const answers = await Promise.all(Array.from({ length: 50 }, () => made.catalog.ping()));
    expect(new Set(answers.map(errorKind))).toEqual(new Set(['catalog-unavailable']));
    await server.up();
    expect(await made.told.count(4)).toEqual([
      ...['catalog-unavailable', 'open', 'catalog-unavailable', 'open'],
    ]);
    expect(await nodesOf(made)).toEqual([NODE]);
    await publishOne(made.catalog);
    await made.catalog.close();
  }, 120_000);

  test('that comes back as one of a newer program is not used', async () => {
    if (!server.canRestart) return;
    const url = await server.newDatabase();
    const made = reopening(url);
    value(await made.firstTry);
    const newer = `INSERT INTO migration (id, breaking, applied_at_ms) VALUES ('9999-new', 1, 1)`;
    await server.admin(newer, url);
    await server.down('immediate');
    expect(errorKind(await made.catalog.ping())).toBe('catalog-unavailable');
    await server.up();
    expect((await made.told.count(3)).slice(2)).toEqual(['catalog-newer']);
    expect(errorKind(await made.catalog.list({}))).toBe('catalog-newer');
    await server.admin(`DELETE FROM migration WHERE id = '9999-new'`, url);
    expect((await made.told.count(4)).slice(3)).toEqual(['open']);
    value(await made.catalog.list({}));
    await made.catalog.close();
  }, 120_000);

  test('behind a network that is cut in mid-transaction is away, until it is mended', async () => {
    await using network = await Network.before(await server.newDatabase());
    const { statementTimeoutMs, clockOf } = silence;
    const made = reopening(network.url, {
      statementTimeoutMs,
      clock: clockOf(() => network.isCut),
    });
    value(await made.firstTry);
    await publishOne(made.catalog);
    const cut = made.catalog.database.write('test', async (tx) => {
      await sql`SELECT 1`.execute(tx.db);
      network.cut();
      await sql`SELECT 1`.execute(tx.db);
    });
    await expect(cut).rejects.toMatchObject({ detail: { kind: 'catalog-unavailable' } });
    expect(errorKind(await made.catalog.ping())).toBe('catalog-unavailable');
    network.mend();
    expect(await made.told.count(3)).toEqual(['open', 'catalog-unavailable', 'open']);
    await publishOne(made.catalog);
    // Closing waits for nobody's goodbye either, and leaves no socket that keeps a process alive.
    network.cut();
    await made.catalog.close();
    await network.closed();
  });
});
