/**
 * The crash matrix of DESIGN §10: `varve serve` dies with SIGKILL at each named step of a capture and
 * of a compaction (src/crash-points.ts), for each dialect. After the restart the VM runs, nothing
 * partial is left, what was committed is published exactly once, and the next capture restores as the
 * guest is, page by page.
 *
 * By default: every point for one dialect and the points around the commit for the other two.
 * `MATRIX=full npx vitest run test/lineage/crash-matrix.test.ts` runs every point for every dialect.
 */
import { expect, test } from 'vitest';
import type { CaptureView, Dialect } from '../../src/capture/types.ts';
import { crashPoints, type CrashPoint } from '../../src/crash-points.ts';
import { Random } from './model/pages.ts';
import { World, maxChain, noCounts, writePages } from './model/world.ts';
import type { ModelVm } from './model/world.ts';

const ofCapture = crashPoints.filter((point) => !/^(attach|fork|compaction)/.test(point));
const chosen: Readonly<Record<Dialect, readonly CrashPoint[]>> = {
  aenv: crashPoints,
  firecracker: ['set-fetched', 'seal-recorded'],
  e2b: ['ledger-durable', 'layer-sealed'],
};
const matrix = (Object.keys(chosen) as Dialect[]).flatMap((dialect) => ({
  dialect,
  points: process.env['MATRIX'] === 'full' ? crashPoints : chosen[dialect],
}));

/** What becomes of the capture that the daemon died in. */
const committedFrom = ofCapture.indexOf('seal-recorded');
const becomes = (point: CrashPoint): CaptureView['status'] | 'either' => {
  // Where the VM may run again before the copy is sealed, the step is not the last one passed.
  if (point === 'before-resume' || point === 'vm-resumed') return 'either';
  return ofCapture.indexOf(point) >= committedFrom ? 'published' : 'aborted';
};

async function dieIn(world: World, vm: ModelVm, point: CrashPoint): Promise<string | null> {
  world.daemon.crashAt(point);
  if (point.startsWith('compaction')) return dieInCompaction(world, vm);
  world.expecting(vm);
  const { captureId } = await world.daemon.startCapture(vm.id);
  expect(await world.daemon.exited()).toBe('SIGKILL');
  return captureId;
}

/** Captures until a compaction begins. */
async function dieInCompaction(world: World, vm: ModelVm): Promise<null> {
  for (let i = 0; i <= maxChain && world.daemon.alive; i += 1) {
    world.expecting(vm);
    try {
      const { captureId } = await world.daemon.startCapture(vm.id);
      await world.follow(captureId);
      await world.settle();
    } catch {
      break;
    }
  }
  expect(await world.daemon.exited()).toBe('SIGKILL');
  return null;
}

test.each(matrix)(
  'dialect $dialect: killed at any step, the VM runs and the next capture is complete',
  { timeout: 0 },
  async ({ dialect, points }) => {
    const world = new World({
      ...{ dialect, random: new Random(7), counts: noCounts(), log: () => undefined },
      plain: true,
    });
    await using made = world;
    void made;
    await world.daemon.start();
    const vm = await world.addVm(new Random(1), 'dirty');
    for (const [round, point] of points.entries()) {
      if (/^(attach|fork)/.test(point)) continue;
      // A page that the capture of the crash may lose, and one that was zeroed over its parent.
      await writePages(vm, [10 + round, 300 + round], {
        fill: 'random',
        value: round,
        words: 1024,
      });
      if (round > 0)
        await writePages(vm, [300 + round - 1], { fill: 'zero', value: 0, words: 1024 });
      const captureId = await dieIn(world, vm, point);
      await world.daemon.start();
      const ended = await world.settle();
      if (captureId !== null && becomes(point) !== 'either') {
        expect.soft(ended[0]?.status, point).toBe(becomes(point));
        if (becomes(point) === 'published') await world.compareNew();
      }
      await world.check();
      await writePages(vm, [600 + round], { fill: 'random', value: round, words: 1024 });
      world.expecting(vm);
      await world.follow((await world.daemon.startCapture(vm.id)).captureId);
      expect((await world.settle())[0]?.status, point).toBe('published');
      await world.compareNew();
      await world.check();
    }
    await world.checkCatalog();
  },
);
