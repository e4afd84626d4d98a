/** The real daemon, started and running while its catalog is away: what goes on, what fails fast. */
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { describe, expect, test } from 'vitest';
import { openCatalog } from '../../src/catalog/open.ts';
import type { OpenCatalog } from '../../src/catalog/open.ts';
import { launchMiniVm } from '../../src/minivm/launch.ts';
import type { MiniVm } from '../../src/minivm/launch.ts';
import { TestPostgres, postgresMissing } from '../../tools/postgres-server.ts';
import { patient } from '../catalog/catalogs.ts';
import { lockedBy } from '../catalog/locker.ts';
import { mustOk, temporaryFolder } from './fixtures.ts';
import { holdsSettled } from './model/node-state.ts';
import { allHashes, Daemon, restoreInto } from './served.ts';

/** For a machine that is busy with other things. */
const TIMEOUT_MS = 300_000;
/** More than a daemon would give in `TIMEOUT_MS` that waits for a lock in a native call. */
const ANSWERS_MIN = 600;

const retries = '[pipeline.publish]\nretry_min = "10ms"\nretry_max = "100ms"\n';

const launch = (folder: string, id: string): Promise<MiniVm> =>
  launchMiniVm({
    id,
    dialect: 'e2b',
    memoryMib: 32,
    socketPath: join(folder, `${id}.sock`),
  });

/** Its guest stands, since neither it nor its supervisor is there to let it go on. */
async function killWithVmPaused(daemon: Daemon, vm: MiniVm): Promise<string> {
  await vm.fault({ on: 'dirty', action: 'hang' });
  const { captureId } = await daemon.startCapture('vm', { pauseDeadlineMs: 3_600_000 });
  while ((await vm.info()).state !== 'Paused');
  const { pid } = daemon;
  const children = readFileSync(`/proc/${pid}/task/${pid}/children`, 'utf8').trim().split(' ');
  const supervisors = children
    .map(Number)
    .filter((child) => readFileSync(`/proc/${child}/comm`, 'utf8').startsWith('varve-superv'));
  expect(supervisors).toHaveLength(1);
  for (const supervisor of supervisors) process.kill(supervisor, 'SIGSTOP');
  await daemon.kill();
  for (const supervisor of supervisors) process.kill(supervisor, 'SIGKILL');
  await vm.clearFaults();
  expect((await vm.info()).state).toBe('Paused');
  return captureId;
}

/** A capture that commits and cannot be published. */
async function committed(daemon: Daemon, kind: string): Promise<string> {
  const { captureId } = await daemon.startCapture('vm', { resumeAfter: 'commit' });
  for (;;) {
    const { status, failure } = await daemon.show(captureId);
    if (failure !== null) {
      expect([status, failure.kind]).toEqual(['committed', kind]);
      return captureId;
    }
  }
}

/** A fork of `vm`: its child runs, with the memory of its source, before the capture is published. */
async function forkedAway(daemon: Daemon, vm: MiniVm): Promise<{ capture: string; child: MiniVm }> {
  const socketPath = join(daemon.folder, 'child.sock');
  const child = await launchMiniVm({ id: 'child', socketPath, dialect: 'e2b', start: false });
  await vm.pause();
  const expected = await allHashes(vm);
  const children = [{ socketPath, vmId: 'child' }];
  const fork = await daemon.fork('vm', { children, resumeAfter: 'commit' });
  expect(fork).toMatchObject({ capture: { status: 'committed' }, children: [{ failure: null }] });
  await vm.resume();
  const differing = (await allHashes(child)).filter((hash, page) => hash !== expected[page]);
  // The guest's own mailbox has moved.
  expect(differing.length).toBeLessThan(10);
  expect((await child.info()).state).toBe('Running');
  return { capture: fork.capture.captureId, child };
}

const code = ({ body }: { readonly body: unknown }): unknown => (body as { code?: string }).code;

/** What must be so whenever the catalog is away. */
async function expectAway(daemon: Daemon, kind: string): Promise<void> {
  expect((await daemon.send('GET', '/healthz')).status).toBe(200);
  const ready = await daemon.send('GET', '/readyz');
  expect(ready).toMatchObject({
    status: 503,
    body: { status: 'degraded', checks: [{ name: 'catalog', ok: false }, { name: 'folders' }] },
  });
  const list = await daemon.send('GET', '/v1/snapshots');
  expect([list.status, code(list)]).toEqual([503, kind]);
  const target = { snapshot: 'any' };
  const hold = await daemon.send('POST', '/v1/holds', { target, purpose: 'test' });
  expect([hold.status, code(hold)]).toEqual([503, kind]);
  const gc = await daemon.send('POST', '/v1/gc/runs', {});
  expect([gc.status, code(gc)]).toEqual([503, kind]);
  expect(await daemon.text('/metrics')).toMatch(/^varve_catalog_up 0$/m);
}

/** Everything published, once each, and nothing left over. */
async function expectSettled(
  daemon: Daemon,
  catalog: OpenCatalog,
  captures: readonly string[],
): Promise<string[]> {
  const ids: string[] = [];
  for (const capture of captures) {
    while ((await daemon.show(capture)).status !== 'published');
    ids.push((await daemon.show(capture)).result?.snapshotId ?? '');
  }
  const { snapshots } = mustOk(await catalog.list({}));
  expect(snapshots.map(({ id }) => String(id)).sort()).toEqual([...ids].sort());
  const nodes = mustOk(await catalog.listNodes());
  expect(nodes.map(({ id }) => String(id))).toEqual(['test']);
  for (const { id } of nodes) expect(mustOk(await catalog.listUploads(id))).toEqual([]);
  expect((await daemon.send('GET', '/readyz')).status).toBe(200);
  expect(await daemon.text('/metrics')).toMatch(/^varve_catalog_up 1$/m);
  return ids;
}

const missing = postgresMissing();
describe.skipIf(missing !== null)(`PostgreSQL ${missing ?? ''}`, () => {
  test(
    'down at start: VMs run again, captures commit, and all is published once when it is up',
    async () => {
      await using server = await TestPostgres.start();
      if (!server.canRestart) return;
      const folder = temporaryFolder();
      const url = await server.newDatabase();
      await server.down();
      await using vm = await launch(folder, 'vm');
      await using daemon = new Daemon(folder, `${retries}[catalog]\nurl = "${url}"\n`);
      const kind = 'catalog-unavailable';

      // Its first life, in which there has never been a catalog.
      await daemon.start();
      await expectAway(daemon, kind);
      await daemon.attach({ socketPath: vm.socketPath, trackingMode: 'dirty' });
      await vm.run({ pages: { firstPage: 2000, pageCount: 100 }, value: 1 });
      const first = await committed(daemon, kind);
      expect((await vm.info()).state).toBe('Running');
      await vm.run({ pages: { firstPage: 2050, pageCount: 100 }, value: 2 });
      const aborted = await killWithVmPaused(daemon, vm);

      await daemon.start();
      expect((await vm.info()).state).toBe('Running');
      const failure = { kind: 'daemon-restarted' };
      expect(await daemon.show(aborted)).toMatchObject({ status: 'aborted', failure });
      expect(await daemon.show(first)).toMatchObject({ status: 'committed' });
      await expectAway(daemon, kind);
      await using passing = await launch(folder, 'passing');
      await daemon.attach({ socketPath: passing.socketPath, trackingMode: 'dirty' });
      await daemon.detach('passing');
      await vm.run({ pages: { firstPage: 2100, pageCount: 10 }, value: 3 });
      await vm.pause();
      const expected = await allHashes(vm);
      const second = await committed(daemon, kind);
      await vm.resume();
      expect((await daemon.captures()).map(({ captureId }) => String(captureId))).toEqual([
        ...[second, aborted, first],
      ]);

      await server.up();
      const catalog = mustOk(await openCatalog({ ...patient, url }));
      const [, snapshot] = await expectSettled(daemon, catalog, [first, second]);
      expect((await daemon.send('POST', '/v1/gc/runs', {})).status).toBe(200);
      await using copy = await restoreInto(daemon, snapshot ?? '', 'e2b');
      expect(await allHashes(copy)).toEqual(expected);

      // Lost again, with a VM that has a hold: what is owed is paid when the catalog is back.
      await daemon.attach({ socketPath: copy.socketPath, vmId: 'copy', launchParent: snapshot });
      expect(mustOk(await catalog.listHolds({}))).toHaveLength(1);
      await server.down('immediate');
      await expectAway(daemon, kind);
      await daemon.detach('copy');
      expect(await daemon.text('/metrics')).toMatch(/^varve_releases_pending 1$/m);
      const { capture, child } = await forkedAway(daemon, vm);
      await using forked = child;
      void forked;
      await server.up();
      while (!/^varve_releases_pending 0$/m.test(await daemon.text('/metrics')));
      await expectSettled(daemon, catalog, [first, second, capture]);
      const held = mustOk(await catalog.listHolds({}));
      expect(held.map(({ purpose }) => purpose)).toEqual(['prepared']);
      await daemon.detach('child');
      expect(await holdsSettled(daemon)).toEqual([]);
      await catalog.close();
      await daemon.kill('SIGTERM');
      expect(daemon.log).not.toContain('"level":"error"');
    },
    TIMEOUT_MS,
  );
});

describe('SQLite', () => {
  test(
    'locked at start: captures commit, and are published once when it is not',
    async () => {
      const folder = temporaryFolder();
      const path = join(folder, 'catalog.db');
      await using vm = await launch(folder, 'vm');
      const settings = `${retries}[catalog]\nurl = "sqlite:${path}"\nlock_timeout = "100ms"\n`;
      await using daemon = new Daemon(folder, settings);
      await using other = await lockedBy(path, { begin: 'BEGIN EXCLUSIVE' });
      await daemon.start();
      // Until the first try has ended, what is asked waits for it.
      await expectAway(daemon, 'catalog-busy');
      await daemon.attach({ socketPath: vm.socketPath, trackingMode: 'dirty' });
      await vm.run({ pages: { firstPage: 2000, pageCount: 100 }, value: 1 });
      const capture = await committed(daemon, 'catalog-busy');
      const fork = await forkedAway(daemon, vm);
      await using child = fork.child;
      void child;
      await vm.run({ pages: { firstPage: 2200, pageCount: 10 }, value: 2 });
      const last = await committed(daemon, 'catalog-busy');
      await vm.pause();
      const expected = await allHashes(vm);
      await other.end();
      const catalog = mustOk(await openCatalog({ ...patient, url: `sqlite:${path}` }));
      const captures = [capture, fork.capture, last];
      const [, , snapshot] = await expectSettled(daemon, catalog, captures);
      expect(await holdsSettled(daemon)).toHaveLength(1);
      await daemon.detach('child');
      expect(await holdsSettled(daemon)).toEqual([]);
      await catalog.close();
      await using copy = await restoreInto(daemon, snapshot ?? '', 'e2b');
      expect(await allHashes(copy)).toEqual(expected);
    },
    TIMEOUT_MS,
  );

  test(
    'locked for 4 s by another process: health is answered all the while',
    async () => {
      const folder = temporaryFolder();
      const path = join(folder, 'state/catalog.db');
      await using vm = await launch(folder, 'vm');
      await using daemon = new Daemon(folder, `${retries}[catalog]\nlock_timeout = "5m"\n`);
      await daemon.start();
      await daemon.attach({ socketPath: vm.socketPath, trackingMode: 'dirty' });
      await vm.run({ pages: { firstPage: 2000, pageCount: 100 }, value: 1 });
      await using other = await lockedBy(path, { holdMs: 4000 });
      const { captureId } = await daemon.startCapture('vm', { resumeAfter: 'commit' });
      while ((await daemon.show(captureId)).status !== 'committed');
      const seen = { heldLong: false, answers: 0 };
      void other.held.then(() => (seen.heldLong = true));
      while (!seen.heldLong || seen.answers < ANSWERS_MIN) {
        expect((await daemon.send('GET', '/healthz')).status).toBe(200);
        seen.answers += 1;
      }
      console.log(`${seen.answers} answers while the catalog was locked`);
      expect(await daemon.show(captureId)).toMatchObject({ status: 'committed', failure: null });
      await other.end();
      const catalog = mustOk(await openCatalog({ ...patient, url: `sqlite:${path}` }));
      await expectSettled(daemon, catalog, [captureId]);
      await catalog.close();
    },
    TIMEOUT_MS,
  );
});
