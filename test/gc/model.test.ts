/**
 * Random histories against a plain model: publishes on shared and unshared chains, retires, holds,
 * releases, volume switches, uploads given up, and collectors that crash before, inside or after a
 * random transaction or delete; several at once and through two pools of connections. After each
 * step everything claimed must be there; in the end nothing else.
 *
 * It goes on for MODEL_SECONDS per dialect (default 8) and until MODEL_RUNS histories are done
 * (default 1); SEED is the first history's seed, and alone replays only that one.
 */
import { expect, test } from 'vitest';
import type { ArtifactStore } from '../../src/artifact/store.ts';
import type { PublishRequest } from '../../src/catalog/catalog.ts';
import type { TransactionEvent, Transactions, Tx } from '../../src/catalog/database.ts';
import type { OpenCatalog } from '../../src/catalog/open.ts';
import { Collector, gcDefaults } from '../../src/gc/collector.ts';
import { holdId } from '../../src/units.ts';
import type { ContentId, HoldId, LayerUuid, SnapshotId } from '../../src/units.ts';
import { NODE, headOf, onEachDialect, upload, value } from '../catalog/catalogs.ts';
import { World, signal, nothingLeft } from './world.ts';
import { randomOf } from '../../bench/catalog-load.ts';

const seedGiven = process.env['SEED'];
const secondsGiven = process.env['MODEL_SECONDS'];
const runsMin = Number(process.env['MODEL_RUNS'] ?? 1);
const seconds = Number(secondsGiven ?? (seedGiven === undefined ? 8 : 0));
/** Enough for MODEL_RUNS on a busy machine. */
const timeoutMs = (seconds + 120) * 1000 + runsMin * 5000;

class Model {
  readonly visible = new Map<SnapshotId, ContentId>();
  readonly holds = new Map<HoldId, ContentId>();
  readonly volumes = new Map<string, { version: number; contentId: ContentId }>();
  /**
   * Claims that a call under way is ending, or taking: either outcome is right until it is back.
   */
  readonly ending = new Map<ContentId, number>();
  readonly heads = new Map<ContentId, LayerUuid>();
  readonly depths = new Map<LayerUuid, number>();

  claimed(): ContentId[] {
    const volumes = [...this.volumes.values()].map(({ contentId }) => contentId);
    return [...new Set([...this.visible.values(), ...this.holds.values(), ...volumes])];
  }
}

/** Ends a collector at one of its steps: before it, inside its transaction, or right after it. */
class Crash {
  readonly error = new Error('crashed');
  #stepsLeft: number;
  readonly #place: number;

  constructor(random: () => number) {
    this.#stepsLeft = random() < 0.4 ? Infinity : Math.floor(random() * 25);
    this.#place = Math.floor(random() * 3);
  }

  async around<T>(
    step: (inside: (work: () => Promise<T>) => Promise<T>) => Promise<T>,
  ): Promise<T> {
    const left = (this.#stepsLeft -= 1);
    if (left < -1 || (left === -1 && this.#place === 0)) throw this.error;
    const done = await step(async (work) => {
      const result = await work();
      if (left === -1 && this.#place === 1) throw this.error;
      return result;
    });
    if (left === -1) throw this.error;
    return done;
  }
}

/** How many transactions there were, how many at once, and how many had to run again. */
class Traffic {
  transactions = 0;
  again = 0;
  atOnceMax = 0;
  readonly #endsMs: { readonly fromMs: number; readonly toMs: number }[] = [];

  readonly note = ({ attempts, durationMs }: TransactionEvent): void => {
    const toMs = performance.now();
    const fromMs = toMs - durationMs;
    this.transactions += 1;
    if (attempts > 1) this.again += 1;
    this.#endsMs.push({ fromMs, toMs });
    if (this.#endsMs.length > 64) this.#endsMs.shift();
    // Those that ended since this one began were under way with it at its start, or after.
    const atStart = this.#endsMs.filter((other) => other.fromMs <= fromMs && other.toMs > fromMs);
    this.atOnceMax = Math.max(this.atOnceMax, atStart.length);
  };
}

class Run {
  readonly #world: World;
  readonly #catalogs: readonly OpenCatalog[];
  readonly #random: () => number;
  readonly model = new Model();
  /** Objects of captures under way: what a node that restarts keeps. */
  readonly #pending = new Set<PublishRequest>();
  #serial = 0;
  readonly #tag: string;

  constructor(world: World, catalogs: readonly OpenCatalog[], random: () => number, tag: string) {
    this.#world = world;
    this.#catalogs = catalogs;
    this.#random = random;
    this.#tag = tag;
  }

  #pick<T>(all: readonly T[]): T | undefined {
    return all[Math.floor(this.#random() * all.length)];
  }

  get #catalog(): OpenCatalog {
    return this.#pick(this.#catalogs) ?? this.#world.catalog;
  }

  /**
   * The operations of one step go at once. A claim that one of them ends is not relied on by the
   * others.
   */
  step(): Promise<void>[] {
    const busy = new Set<ContentId>();
    return Array.from({ length: 1 + Math.floor(this.#random() * 4) }, () => this.#operation(busy));
  }

  #operation(busy: Set<ContentId>): Promise<void> {
    const dice = this.#random();
    if (dice < 0.3) return this.#publish(busy);
    if (dice < 0.42) return this.#retire(busy);
    if (dice < 0.56) return this.#hold(busy);
    if (dice < 0.7) return this.#release(busy);
    if (dice < 0.8) return this.#volume(busy);
    if (dice < 0.85) return this.#giveUp();
    return this.#collect();
  }

  async #publish(busy: Set<ContentId>): Promise<void> {
    const { model } = this;
    const known = [...model.heads.keys()];
    const base = this.#random() < 0.75 ? this.#pick(known) : undefined;
    const on = base === undefined ? null : (model.heads.get(base) ?? null);
    const safe = base === undefined || (model.claimed().includes(base) && !busy.has(base));
    const count = Math.floor(this.#random() * 3) + (on === null ? 1 : 0);
    if (base !== undefined) busy.add(base);
    const catalog = this.#catalog;
    const prepared = await this.#world.prepare({ layers: count, on });
    // A fork's, whose release may have come before.
    const hold = { holdId: holdId(`${this.#tag}-p${(this.#serial += 1)}`), purpose: 'prepared' };
    const spent = this.#random() < 0.3;
    if (spent) value(await catalog.release(hold.holdId));
    const request = this.#random() < 0.4 ? { ...prepared, hold } : prepared;
    this.#pending.add(request);
    const published = await catalog.publish(request);
    this.#pending.delete(request);
    if (published.ok) {
      model.visible.set(request.snapshotId, request.contentId);
      model.heads.set(request.contentId, headOf(request));
      const asked = 'hold' in request;
      expect(published.value.held).toBe(asked && !spent);
      if (published.value.held) model.holds.set(hold.holdId, request.contentId);
      const again = value(await catalog.publish(request));
      expect(again.created).toBe(false);
      return;
    }
    expect(published.error.kind).toBe('layer-missing');
    expect(safe, `publish on ${String(on)} refused, and its base is claimed`).toBe(false);
  }

  /** Ends a claim that the model has; the model forgets it first. */
  async #retire(busy: Set<ContentId>): Promise<void> {
    const entry = this.#pick([...this.model.visible]);
    if (entry === undefined || busy.has(entry[1])) return;
    busy.add(entry[1]);
    this.model.visible.delete(entry[0]);
    value(await this.#catalog.retire(entry[0]));
  }

  async #hold(busy: Set<ContentId>): Promise<void> {
    const contentId = this.#pick([...this.model.heads.keys()]);
    if (contentId === undefined) return;
    const safe = this.model.claimed().includes(contentId) && !busy.has(contentId);
    busy.add(contentId);
    const id = holdId(`${this.#tag}-${(this.#serial += 1)}`);
    const target = { content: contentId };
    const held = await this.#catalog.hold({ holdId: id, nodeId: NODE, target, purpose: 'vm' });
    if (held.ok) this.model.holds.set(id, contentId);
    else {
      expect(held.error.kind).toBe('content-missing');
      expect(safe, 'a hold was refused on a claimed content').toBe(false);
    }
  }

  async #release(busy: Set<ContentId>): Promise<void> {
    const entry = this.#pick([...this.model.holds]);
    if (entry === undefined || busy.has(entry[1])) return;
    busy.add(entry[1]);
    this.model.holds.delete(entry[0]);
    value(await this.#catalog.release(entry[0]));
    if (this.#random() < 0.2) value(await this.#catalog.release(entry[0]));
  }

  async #volume(busy: Set<ContentId>): Promise<void> {
    const contentId = this.#pick(this.model.claimed());
    const name = `${this.#tag}-vol-${Math.floor(this.#random() * 2)}`;
    const volume = this.model.volumes.get(name);
    if (contentId === undefined || busy.has(contentId)) return;
    if (volume !== undefined && busy.has(volume.contentId)) return;
    busy.add(contentId);
    if (volume === undefined) {
      const created = await this.#catalog.createVolume({ id: name, contentId });
      if (created.ok) this.model.volumes.set(name, { version: 1, contentId });
      return;
    }
    busy.add(volume.contentId);
    this.model.volumes.delete(name);
    const switched = value(
      await this.#catalog.switchVolume({ id: name, version: volume.version, contentId }),
    );
    this.model.volumes.set(name, { version: switched.version, contentId });
  }

  /** A capture that dies after storing its objects, and the node that cleans up when it is back. */
  async #giveUp(): Promise<void> {
    if (this.#random() < 0.5) await this.#world.prepare({ layers: 1 });
    else value(await this.#catalog.recordUpload({ nodeId: NODE, artifacts: [upload()] }));
    if (this.#pending.size > 0 || this.#random() < 0.5) return;
    this.#abandon = true;
  }
  #abandon = false;

  /** A collector that may crash: from then on it neither writes, reads nor deletes. */
  async #collect(): Promise<void> {
    const crash = new Crash(this.#random);
    const { database } = this.#catalog;
    const fragile: Transactions = {
      clock: database.clock,
      freeReserve: () => database.freeReserve(),
      restoreReserve: () => database.restoreReserve(),
      close: () => database.close(),
      read: <T>(name: string, work: (tx: Tx) => Promise<T>): Promise<T> =>
        crash.around((inside) => database.read(name, (tx) => inside(() => work(tx)))),
      write: <T>(name: string, work: (tx: Tx) => Promise<T>): Promise<T> =>
        crash.around((inside) => database.write(name, (tx) => inside(() => work(tx)))),
    };
    const store = new Proxy<ArtifactStore>(this.#world.store, {
      get: (real, name) =>
        name === 'delete'
          ? (...call: Parameters<ArtifactStore['delete']>) =>
              crash.around((inside) => inside(() => real.delete(...call)))
          : (Reflect.get(real, name) as unknown),
    });
    // Claims end at once, so that others take over what is claimed still, or by a dead one.
    const config = { ...gcDefaults, batchMax: 1 + Math.floor(this.#random() * 4), claimMs: 0 };
    const deps = { database: fragile, store, name: 'fragile' };
    const done = await new Collector(deps, config).run({}, signal).catch((error: unknown) => {
      if (error !== crash.error) throw error;
    });
    if (done !== undefined) value(done);
  }

  /**
   * Between steps: every claimed content resolves, its whole chain is there and so are all objects.
   */
  async check(bytes: boolean): Promise<void> {
    if (this.#abandon) {
      this.#abandon = false;
      value(await this.#world.catalog.abandonUploads(NODE, []));
    }
    for (const id of this.model.claimed()) {
      if (bytes) await this.#world.readable(id);
      else await this.#present(id);
    }
  }

  async #present(id: ContentId): Promise<void> {
    const { catalog, store } = this.#world;
    const content = value(await catalog.findContent(id));
    const chains = await Promise.all(content.heads.map(({ layer }) => catalog.lineage(layer)));
    const layers = chains.flatMap((chain) => value(chain).map(({ artifact }) => artifact));
    for (const { key } of [content.manifest, ...layers]) value(await store.head(key));
  }

  /** Ends every claim and collects: then nothing may be left but records. */
  async quiesce(): Promise<void> {
    const { catalog } = this.#world;
    for (const id of this.model.visible.keys()) value(await catalog.retire(id));
    value(await catalog.releaseMany([...this.model.holds.keys()]));
    for (const id of this.model.volumes.keys()) value(await catalog.deleteVolume(id));
    value(await catalog.abandonUploads(NODE, []));
    await this.#world.collect();
    expect(await this.#world.rows()).toMatchObject({ ...nothingLeft, volume: 0 });
    expect(await this.#world.objects()).toEqual([]);
  }
}

onEachDialect('random histories', (dialect) => {
  test(
    'whatever is claimed stays whole, and in the end nothing else is left',
    async () => {
      const traffic = new Traffic();
      const config = { onTransaction: traffic.note };
      await using world = await World.open(dialect, { inMemory: true, ...config });
      const catalogs = [world.catalog, await world.another(config)];
      const first = seedGiven === undefined ? Date.now() % 2 ** 31 : Number(seedGiven);
      const endMs = Date.now() + seconds * 1000;
      let runs = 0;
      let steps = 0;
      do {
        const seed = first + runs;
        // On SQLite two connections mostly wait for each other: three of four histories do without.
        const isOneEnough = dialect.name === 'sqlite' && seed % 4 !== 0;
        const used = isOneEnough ? catalogs.slice(0, 1) : catalogs;
        const run = new Run(world, used, randomOf(seed), `r${seed}`);
        try {
          const length = 4 + (seed % 9);
          for (let step = 0; step < length; step += 1) {
            await Promise.all(run.step());
            await run.check(step === length - 1);
            steps += 1;
          }
          await run.quiesce();
        } catch (error) {
          console.error(`${dialect.name}: failed with SEED=${seed}`);
          throw error;
        }
        runs += 1;
      } while (Date.now() < endMs || runs < runsMin);
      const { transactions, atOnceMax, again } = traffic;
      console.log(
        `${dialect.name}: ${runs} histories, ${steps} steps, first SEED=${first}; ` +
          `${transactions} transactions, up to ${atOnceMax} at once, ${again} run again`,
      );
    },
    timeoutMs,
  );
});
