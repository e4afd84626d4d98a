/** Forks, their holds, and a catalog that is not there, late, or asked in another order. */
import { existsSync } from 'node:fs';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import type { Catalog, Hold, PublishRequest } from '../../src/catalog/catalog.ts';
import type { OpenCatalog } from '../../src/catalog/open.ts';
import { PreparedEntries } from '../../src/capture/prepared-entries.ts';
import { silentObserver } from '../../src/capture/observer.ts';
import type { CaptureView, ForkView } from '../../src/capture/types.ts';
import { Collector } from '../../src/gc/collector.ts';
import type { MiniVm } from '../../src/minivm/launch.ts';
import { err } from '../../src/result.ts';
import { nodeId, type VmId } from '../../src/units.ts';
import {
  allHashes,
  firstDifference,
  Harness,
  never,
  valueOf,
  expectWholeManifest,
  objects,
  until,
} from './harness.ts';

const eager = { pipeline: { publish: { retry_min: '10ms', retry_max: '100ms' } } };
const away = err({ kind: 'catalog-unavailable' as const, message: 'not now' });

/** A catalog that answers nothing while `down`; and one whose publish may be stood in for. */
class Link {
  down = false;
  calls: string[] = [];
  publish: ((real: OpenCatalog, request: PublishRequest) => ReturnType<Catalog['publish']>) | null =
    null;

  readonly around = (real: OpenCatalog): Catalog =>
    new Proxy<Catalog>(real, {
      get: (target, name) => {
        const member = Reflect.get(target, name) as unknown;
        if (typeof member !== 'function') return member;
        return (...call: unknown[]): unknown => {
          this.calls.push(String(name));
          if (this.down) return Promise.resolve(away);
          if (name === 'publish' && this.publish !== null) {
            return this.publish(real, call[0] as PublishRequest);
          }
          return Reflect.apply(member, target, call) as unknown;
        };
      },
    });
}

interface Forked {
  readonly view: ForkView;
  readonly minis: readonly MiniVm[];
  readonly ids: readonly VmId[];
}

async function sourceOf(harness: Harness): Promise<{ source: MiniVm; vmId: VmId }> {
  const source = await harness.vm({ dialect: 'aenv', memoryMib: 16 });
  const { vmId } = await harness.attach(source, { trackingMode: 'dirty' });
  await source.run({ pages: { firstPage: 2000, pageCount: 50 }, value: 1 });
  return { source, vmId };
}

/** Every child must start. */
async function forkOf(harness: Harness, vmId: VmId, count: number): Promise<Forked> {
  const options = { dialect: 'aenv', start: false } as const;
  const minis = await Promise.all(Array.from({ length: count }, () => harness.vm(options)));
  const children = minis.map(({ socketPath }) => ({ socketPath }));
  const request = { children, resumeAfter: 'commit' as const };
  const view = valueOf(await harness.service.fork(vmId, request));
  expect(view.children.map(({ failure }) => failure)).toEqual(children.map(() => null));
  const ids = view.children.flatMap(({ vm }) => (vm === null ? [] : [vm.vmId]));
  return { view, minis, ids };
}

async function end(minis: readonly MiniVm[]): Promise<void> {
  for (const mini of minis) await mini[Symbol.asyncDispose]();
}

const openHolds = async (harness: Harness): Promise<readonly Hold[]> =>
  valueOf(await harness.catalog.listHolds({}));

/** What the daemon's flusher does. Returns what was released. */
async function flush(harness: Harness): Promise<readonly string[]> {
  const ids = harness.nodeDb.pendingReleases(100).map(({ holdId }) => holdId);
  valueOf(await harness.catalog.releaseMany(ids));
  for (const id of ids) valueOf(harness.nodeDb.releaseDone(id));
  return ids;
}

async function published(harness: Harness, { capture }: ForkView): Promise<CaptureView> {
  const view = await harness.service.waitFor(capture.captureId, never);
  expect(view.status).toBe('published');
  return view;
}

async function collect(harness: Harness): Promise<void> {
  const { database } = harness.catalog;
  const collector = new Collector({ database, store: harness.store, name: 'test' });
  valueOf(await collector.run({}, never));
}

test('children start while the catalog is away; the fork is published later, under one hold', async () => {
  const link = new Link();
  const log: string[] = [];
  await using harness = await Harness.make(
    eager,
    {},
    { around: link.around, onStatement: (sql) => log.push(sql) },
  );
  const { source, vmId } = await sourceOf(harness);
  await using from = source;
  const expected = (await allHashes(from)).subarray(1024, 4096);
  link.down = true;
  link.calls = [];
  log.length = 0;
  const { view, minis, ids } = await forkOf(harness, vmId, 3);
  expect(view.capture.status).toBe('committed');
  expect(log).toEqual([]);
  // The publish has asked, and will again; the fork itself has not.
  const ofPublish = ['abandonUploads', 'show'];
  expect(link.calls.filter((name) => !ofPublish.includes(name))).toEqual([]);
  for (const mini of minis) {
    expect((await mini.info()).state).toBe('Running');
    expect(firstDifference(await mini.hashes(1024, 3072), expected)).toBeNull();
  }
  const prepared = join(harness.config.paths.state, 'prepared', view.capture.captureId);
  expect(existsSync(prepared)).toBe(true);

  link.down = false;
  await published(harness, view);
  const held = await openHolds(harness);
  expect(held.map(({ purpose }) => purpose)).toEqual(['prepared']);
  const owners = harness.nodeDb.holdOwners().map(({ hold, kind }) => [hold, kind]);
  const hold = held[0]?.id;
  expect(owners).toEqual([[hold, 'prepared'], ...ids.map(() => [hold, 'vm'])]);

  log.length = 0;
  for (const [at, id] of ids.entries()) {
    expect([existsSync(prepared), harness.nodeDb.countReleases()]).toEqual([true, 0]);
    valueOf(await harness.service.detach(id));
    await minis[at]?.[Symbol.asyncDispose]();
  }
  expect(log).toEqual([]);
  expect(existsSync(prepared)).toBe(false);
  expect(harness.nodeDb.holdOwners()).toEqual([]);
  expect(harness.nodeDb.leases()).toEqual([]);
  expect(await flush(harness)).toEqual([hold]);
  expect(await openHolds(harness)).toEqual([]);
});

test('three children cost the catalog what one does: one row of a hold in the publish', async () => {
  const log: string[] = [];
  await using harness = await Harness.make(eager, {}, { onStatement: (sql) => log.push(sql) });
  const { source, vmId } = await sourceOf(harness);
  await using from = source;
  await harness.published(vmId);
  const logOf = async (work: () => Promise<unknown>): Promise<string[]> => {
    await from.run({ pages: { firstPage: 3000, pageCount: 5 }, value: 2 });
    log.length = 0;
    await work();
    return log.map((sql) => sql.slice(0, 60)).sort();
  };
  const plain = await logOf(() => harness.published(vmId, { resumeAfter: 'commit' }));
  const forks: { made: Forked; log: string[] }[] = [];
  for (const count of [1, 3]) {
    let made: Forked | undefined;
    const logged = await logOf(async () => {
      made = await forkOf(harness, vmId, count);
      await published(harness, made.view);
    });
    if (made !== undefined) forks.push({ made, log: logged });
  }
  const [one, three] = forks.map((fork) => fork.log);
  expect(one).toEqual(three);
  const isHold = (sql: string): boolean => sql.startsWith('insert into "hold"');
  expect(three?.filter(isHold)).toHaveLength(1);
  expect(three?.filter((sql) => !isHold(sql))).toEqual(plain);
  await end(forks.flatMap(({ made }) => made.minis));
});

test('a fork that is over before its publish leaves no hold, whichever comes first', async () => {
  const link = new Link();
  await using harness = await Harness.make(eager, {}, { around: link.around });
  const { source, vmId } = await sourceOf(harness);
  await using from = source;
  void from;

  // Nobody owns the hold any more when the publish begins: it is not even asked for.
  link.down = true;
  const first = await forkOf(harness, vmId, 1);
  for (const id of first.ids) valueOf(await harness.service.detach(id));
  const [early] = harness.nodeDb.pendingReleases(10);
  let asked: PublishRequest | undefined;
  link.publish = (real, request) => {
    asked = request;
    return real.publish(request);
  };
  link.down = false;
  await published(harness, first.view);
  expect([asked?.hold, await openHolds(harness)]).toEqual([undefined, []]);
  expect(await flush(harness)).toEqual([early?.holdId]);

  // It ends, and is released, after the publish has asked for it: the id is spent.
  link.down = true;
  const second = await forkOf(harness, vmId, 1);
  const answers: unknown[] = [];
  link.publish = async (real, request) => {
    for (const id of second.ids) valueOf(await harness.service.detach(id));
    expect(await flush(harness)).toEqual([request.hold?.holdId]);
    const answer = await real.publish(request);
    answers.push(answer.ok ? answer.value.held : answer.error);
    return answer;
  };
  link.down = false;
  const { result } = await published(harness, second.view);
  expect([answers, await openHolds(harness)]).toEqual([[false], []]);
  valueOf(await harness.catalog.resolve(result?.snapshotId ?? ''));

  // The answer of the publish is lost: the next try finds the snapshot, and its one hold.
  link.down = true;
  const third = await forkOf(harness, vmId, 1);
  link.publish = async (real, request) => {
    expect(valueOf(await real.publish(request)).held).toBe(true);
    return away;
  };
  link.down = false;
  await published(harness, third.view);
  expect(await openHolds(harness)).toHaveLength(1);
  for (const id of third.ids) valueOf(await harness.service.detach(id));
  expect(await flush(harness)).toHaveLength(1);
  expect(await openHolds(harness)).toEqual([]);
  await end([first, second, third].flatMap(({ minis }) => minis));
});

test('captures of children are published before their source is, and bring its layer', async () => {
  const link = new Link();
  await using harness = await Harness.make(eager, {}, { around: link.around });
  const { source, vmId } = await sourceOf(harness);
  await using from = source;
  void from;
  link.down = true;
  const { view, minis, ids } = await forkOf(harness, vmId, 2);
  const late = view.capture.result?.snapshotId;
  const order: string[] = [];
  link.publish = async (real, request) => {
    if (request.snapshotId === late && order.length < 2) return away;
    const answer = await real.publish(request);
    if (answer.ok) order.push(request.snapshotId);
    return answer;
  };
  link.down = false;
  const made = [];
  for (const [at, mini] of minis.entries()) {
    await mini.run({ pages: { firstPage: 3000 + at * 100, pageCount: 5 }, value: 2 + at });
    const expected = await allHashes(mini);
    const id = ids[at];
    if (id === undefined) throw new Error('a child for each VMM');
    made.push({ expected, result: await harness.published(id) });
  }
  const last = await published(harness, view);
  expect(order).toEqual([...made.map(({ result }) => result.snapshotId), late]);
  for (const { expected, result } of made) {
    expect(result.predecessor).toBe(view.capture.result?.layer);
    await using copy = await harness.restore(result.snapshotId);
    expect(firstDifference(await allHashes(copy), expected)).toBeNull();
    await expectWholeManifest(harness, result.snapshotId);
  }
  await expectWholeManifest(harness, last.result?.snapshotId ?? '');
  expect(valueOf(await harness.catalog.listUploads(nodeId('test-node')))).toEqual([]);
  await collect(harness);
  // Three layers, three VM states, three manifests.
  expect(await objects(harness)).toBe(9);
  await end(minis);
});

test('a child’s publish waits for the one under way that brings the same layer', async () => {
  const link = new Link();
  await using harness = await Harness.make(eager, {}, { around: link.around });
  const { source, vmId } = await sourceOf(harness);
  await using from = source;
  void from;
  let release: () => void = () => undefined;
  const held = new Promise<void>((resolve) => (release = resolve));
  let arrived: () => void = () => undefined;
  const inPublish = new Promise<void>((resolve) => (arrived = resolve));
  link.publish = async (real, request) => {
    arrived();
    await held;
    return await real.publish(request);
  };
  const { view, minis, ids } = await forkOf(harness, vmId, 1);
  await inPublish;
  const [child] = ids;
  if (child === undefined) throw new Error('one child');
  link.calls = [];
  const started = await harness.startCapture(child, { resumeAfter: 'commit' });
  for await (const event of harness.service.watch(started.captureId, never)) {
    if (event.type === 'stage' && event.stage === 'publish') break;
  }
  // It has nothing to ask before its turn, however often others are served.
  for (let i = 0; i < 100; i += 1) valueOf(await harness.catalog.ping());
  const asked = [...link.calls];
  release();
  expect(asked).toEqual([]);
  await published(harness, view);
  const { result } = await harness.service.waitFor(started.captureId, never);
  await collect(harness);
  expect(await objects(harness)).toBe(6);
  await expectWholeManifest(harness, result?.snapshotId ?? '');
  await end(minis);
});

test('a fork’s snapshot that is retired stays while a child lives, and goes after it', async () => {
  await using harness = await Harness.make(eager);
  const { source, vmId } = await sourceOf(harness);
  await using from = source;
  void from;
  const { view, minis, ids } = await forkOf(harness, vmId, 2);
  const { result } = await published(harness, view);
  valueOf(await harness.catalog.retire(result?.snapshotId ?? ''));
  await collect(harness);
  expect(await objects(harness)).toBe(3);
  const [mini] = minis;
  const [child] = ids;
  if (mini === undefined || child === undefined) throw new Error('two children');
  await mini.run({ pages: { firstPage: 3000, pageCount: 5 }, value: 2 });
  const expected = await allHashes(mini);
  const next = await harness.published(child);
  await using copy = await harness.restore(next.snapshotId);
  expect(firstDifference(await allHashes(copy), expected)).toBeNull();
  valueOf(await harness.catalog.retire(next.snapshotId));
  for (const id of ids) valueOf(await harness.service.detach(id));
  await collect(harness);
  expect(await objects(harness)).toBeGreaterThan(0);
  expect(await flush(harness)).toHaveLength(1);
  await collect(harness);
  expect(await objects(harness)).toBe(0);
  await end(minis);
});

test('without advance a fork’s layer is no memory parent, and its children sit on it all the same', async () => {
  await using harness = await Harness.make({ ...eager, lineage: { advance: false } });
  const { source, vmId } = await sourceOf(harness);
  await using from = source;
  const expected = (await allHashes(from)).subarray(1024, 4096);
  const { view, minis, ids } = await forkOf(harness, vmId, 1);
  const { result } = await published(harness, view);
  expect(harness.service.getVm(vmId)?.memoryParent).toBeNull();
  const [child] = ids;
  const [mini] = minis;
  if (child === undefined || mini === undefined) throw new Error('one child');
  expect(harness.service.getVm(child)?.launchParent).toBe(result?.layer);
  expect(firstDifference(await mini.hashes(1024, 3072), expected)).toBeNull();
  expect((await harness.published(child)).predecessor).toBe(result?.layer);
  valueOf(await harness.service.detach(child));
  // Nobody needs the layer any more.
  expect((await harness.leftovers()).layers).toEqual([]);
  await end(minis);
});

test('a fork whose capture aborts, or none of whose children starts, keeps nothing', async () => {
  await using harness = await Harness.make(eager);
  const { source, vmId } = await sourceOf(harness);
  await using from = source;
  const children = [{ socketPath: join(harness.folder, 'none.sock') }];
  await from.fault({ on: 'pause', action: 'refuse' });
  const aborted = await harness.service.fork(vmId, { children });
  expect(aborted.ok ? '' : aborted.error.kind).toBe('vmm-refused');
  const { capture, ...made } = valueOf(await harness.service.fork(vmId, { children }));
  expect(made.children[0]?.failure?.kind).toBe('path-missing');
  await published(harness, { capture, children: [] });
  const root = join(harness.config.paths.state, 'prepared');
  for (const { captureId } of harness.service.listCaptures(vmId)) {
    expect(existsSync(join(root, captureId))).toBe(false);
  }
  expect([harness.nodeDb.holdOwners(), harness.nodeDb.leases()]).toEqual([[], []]);
  await flush(harness);
  expect(await openHolds(harness)).toEqual([]);
});

test('the folder of an entry stays while its fork is under way, whatever becomes of a child', async () => {
  await using harness = await Harness.make();
  const { config, nodeDb } = harness;
  const entries = new PreparedEntries({ config, nodeDb, observer: silentObserver });
  const entry = entries.begin('e1');
  await entry.makeFolder();
  await entries.settle('e1');
  expect(existsSync(entry.folder)).toBe(true);
  await entries.end('e1');
  expect(existsSync(entry.folder)).toBe(false);
});

test.each(['the daemon started again', 'its source was detached'] as const)(
  'a fork that is asked for again after %s starts children from its snapshot',
  async (after) => {
    await using harness = await Harness.make(eager);
    const { source, vmId } = await sourceOf(harness);
    await using from = source;
    const expected = (await allHashes(from)).subarray(1024, 4096);
    const request = { idempotencyKey: 'k1', resumeAfter: 'commit' } as const;
    const none = [{ socketPath: join(harness.folder, 'none.sock') }];
    const first = valueOf(await harness.service.fork(vmId, { ...request, children: none }));
    await published(harness, first);
    if (after === 'its source was detached') {
      valueOf(await harness.service.detach(vmId));
    } else {
      await harness.stop();
      await harness.start();
    }
    await using mini = await harness.vm({ dialect: 'aenv', start: false });
    const children = [{ socketPath: mini.socketPath }];
    const again = valueOf(await harness.service.fork(vmId, { ...request, children }));
    expect(again.capture.captureId).toBe(first.capture.captureId);
    expect(again.children[0]?.failure).toBeNull();
    expect(firstDifference(await mini.hashes(1024, 3072), expected)).toBeNull();
    await flush(harness);
    // That of the child; those of reading the snapshot are over.
    expect((await openHolds(harness)).map(({ purpose }) => purpose)).toEqual(['vm']);
    const owners = harness.nodeDb.holdOwners().map(({ kind }) => kind);
    expect(owners).toEqual(['vm']);
    valueOf(await harness.service.detach(again.children[0]?.vm?.vmId as never));
    await flush(harness);
    expect(await openHolds(harness)).toEqual([]);
    expect([harness.nodeDb.holdOwners(), harness.nodeDb.leases()]).toEqual([[], []]);
  },
);

test('a fork of a VM that is found again while its alias is asked for is a fork like any other', async () => {
  let found: (() => Promise<void>) | null = null;
  const around = (real: OpenCatalog): Catalog => ({
    ...real,
    show: async (name) => {
      if (name === 'golden') await found?.();
      return real.show(name);
    },
  });
  await using harness = await Harness.make(eager, {}, { around });
  const { source, vmId } = await sourceOf(harness);
  await using from = source;
  await harness.stop();
  await from.fault({ on: 'any', action: 'refuse', times: 0 });
  await harness.start();
  expect(harness.service.getVm(vmId)?.state).toBe('unreachable');
  found = async () => {
    await from.clearFaults();
    await until(() => harness.service.getVm(vmId)?.state === 'attached');
  };
  await using mini = await harness.vm({ dialect: 'aenv', start: false });
  const children = [{ socketPath: mini.socketPath }];
  const request = { children, alias: 'golden', resumeAfter: 'commit' } as const;
  const made = valueOf(await harness.service.fork(vmId, request));
  expect(made.children[0]?.failure).toBeNull();
  await published(harness, made);
  valueOf(await harness.service.detach(made.children[0]?.vm?.vmId as never));
  expect([harness.nodeDb.holdOwners(), harness.nodeDb.leases()]).toEqual([[], []]);
});
