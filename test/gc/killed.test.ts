/** A collector process that is killed in the middle of each of its phases. */
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { expect, test } from 'vitest';
import { holdId } from '../../src/units.ts';
import { NODE, headOf, onEachDialect, value } from '../catalog/catalogs.ts';
import { World } from './world.ts';

const dist = new URL('../../dist/', import.meta.url).href;

/**
 * Collects, and dies by SIGKILL inside the first transaction of the given name, its statements done
 * and not committed; or, at `delete`, once the first object's bytes are gone. Runs what `npm run
 * build:ts` made. Its claims end at once, as they would after `claimMs`.
 */
const script = `
  const { openCatalog } = await import('${dist}src/catalog/open.js');
  const { FileArtifactStore } = await import('${dist}src/artifact/file-store.js');
  const { Collector, gcDefaults } = await import('${dist}src/gc/collector.js');
  const [url, root, dieIn] = process.argv.slice(1);
  const catalog = (await openCatalog({ url, lockTimeoutMs: 600_000 })).value;
  const store = (await FileArtifactStore.open({ root, node: 'mortal' })).value;
  const after = async (name, work) => {
    const result = await work();
    if (name === dieIn) process.kill(process.pid, 'SIGKILL');
    return result;
  };
  const { database } = catalog;
  const mortal = {
    freeReserve: () => database.freeReserve(),
    restoreReserve: () => database.restoreReserve(),
    clock: database.clock,
    read: (name, work) => database.read(name, (tx) => after(name, () => work(tx))),
    write: (name, work) => database.write(name, (tx) => after(name, () => work(tx))),
  };
  const mortalStore = new Proxy(store, {
    get: (real, name) => {
      const member = real[name];
      if (typeof member !== 'function') return member;
      if (name !== 'delete') return member.bind(real);
      return (...call) => after('delete', () => real.delete(...call));
    },
  });
  const config = { ...gcDefaults, batchMax: 2, inFlightMax: 1, claimMs: 0, retentionMs: -1000 };
  const deps = { database: mortal, store: mortalStore, name: 'mortal' };
  await new Collector(deps, config).run({}, new AbortController().signal);
`;

async function collectAndDie(world: World, dieIn: string): Promise<NodeJS.Signals | null> {
  const flags = ['--input-type=module', '-e', script, world.url, world.root, dieIn];
  const child = spawn(process.execPath, flags, { stdio: ['ignore', 'inherit', 'inherit'] });
  const [, signal] = (await once(child, 'exit')) as [number | null, NodeJS.Signals | null];
  return signal;
}

const phases = [
  'plan-contents',
  'condemn-contents',
  'condemn-layers',
  'reclaim-claim',
  'delete',
  'reclaim-finish',
  'trim',
] as const;

onEachDialect('a collector killed', (dialect) => {
  test('in any phase leaves nothing damaged, and nothing that the next one does not finish', async () => {
    await using world = await World.open(dialect);
    const base = await world.publish({ layers: 2 });
    const kept = await world.publish({ on: headOf(base) });
    const held = await world.publish();
    const target = { content: held.contentId };
    value(
      await world.catalog.hold({ holdId: holdId('open'), nodeId: NODE, target, purpose: 'vm' }),
    );
    value(await world.catalog.retire(base.snapshotId));
    value(await world.catalog.retire(held.snapshotId));
    for (const phase of phases) {
      for (let count = 0; count < 2; count += 1) {
        const made = await world.publish({ layers: 2, on: count === 0 ? null : headOf(base) });
        value(await world.catalog.retire(made.snapshotId));
      }
      value(await world.catalog.release(holdId(`closed-${phase}`)));
      expect([phase, await collectAndDie(world, phase)]).toEqual([phase, 'SIGKILL']);
      expect(await world.readable(kept.contentId)).toBe(5);
      expect(await world.readable(held.contentId)).toBe(3);
    }
    await world.collect({ batchMax: 3, retentionMs: -1000 });
    expect(await world.readable(kept.contentId)).toBe(5);
    expect(await world.readable(held.contentId)).toBe(3);
    // What is kept and held: 2 + 1 and 1 layers, and a manifest and a VM state each.
    expect(await world.objects()).toHaveLength(8);
    expect(await world.rows()).toMatchObject({
      artifact: 8,
      candidate_content: 0,
      candidate_layer: 0,
      content: 2,
      hold: 1,
      layer: 4,
      reclaim: 0,
      snapshot: 1,
      upload: 0,
    });
  }, 240_000);
});
