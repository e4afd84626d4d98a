/** One run of the model test: a world, random steps, and at the end every comparison there is. */
import type { Dialect } from '../../../src/capture/types.ts';
import { Random } from './pages.ts';
import { stepWeights, takeStep } from './steps.ts';
import type { Step } from './steps.ts';
import { World } from './world.ts';
import type { Counts } from './world.ts';

export interface RunOptions {
  readonly seed: number;
  readonly dialect: Dialect;
  readonly steps: number;
  readonly counts: Counts;
  readonly stepCounts?: Partial<Record<Step, number>>;
  /** Compare each snapshot at once, to find the first that is wrong. */
  readonly compareEach?: boolean;
  /** Snapshots rebuilt and compared at the end; the newest of each VM is always among them. */
  readonly comparedMax: number;
}

/** Throws with the seed and all steps where anything is not as the model says. */
export async function runModel(options: RunOptions): Promise<void> {
  const { seed, dialect, steps, counts } = options;
  const lines: string[] = [];
  const log = (line: string): void => void lines.push(line);
  const first = new Random(seed);
  await using world = new World({ dialect, random: first, counts, log });
  try {
    await world.daemon.start();
    await world.addVm(first);
    for (let step = 1; step <= steps; step += 1) {
      // A seed per step: what one does with its choices moves no other's.
      const random = new Random((seed ^ Math.imul(step, 0x9e3779b1)) >>> 0);
      const kind = random.weighted(stepWeights);
      if (options.stepCounts !== undefined) {
        options.stepCounts[kind] = (options.stepCounts[kind] ?? 0) + 1;
      }
      await takeStep(world, kind, random);
      await world.check();
      if (options.compareEach === true) await world.compareNew();
    }
    await endOfRun(world, first, options.comparedMax);
  } catch (error) {
    const replay = `MODEL_SEED=${seed} MODEL_STEPS=${steps} MODEL_DIALECT=${dialect}`;
    const tail = world.daemon.log.split('\n').slice(-30).join('\n');
    const message = `${replay}: ${String(error)}\n${lines.join('\n')}\ndaemon: ${tail}`;
    throw new Error(message, { cause: error });
  }
}

async function endOfRun(world: World, random: Random, comparedMax: number): Promise<void> {
  await world.checkCatalog();
  const newest = world.kept.at(-1);
  if (newest !== undefined) await world.restore(newest);
  const left = [...world.kept];
  for (let compared = 0; left.length > 0 && compared < comparedMax; compared += 1) {
    const [kept] = left.splice(compared === 0 ? left.length - 1 : random.below(left.length), 1);
    if (kept !== undefined) await world.compare(kept);
  }
}
