/**
 * The model test of DESIGN §12: random steps over real small VMs through the real daemon, which is
 * killed and restarted on the way; every restore is compared page by page with a plain array of
 * pages. The seed is printed.
 *
 * - `MODEL_SEED=… MODEL_STEPS=… MODEL_DIALECT=… npx vitest run test/lineage/model.test.ts` replays a
 *   run or makes it longer. The steps and their choices are the same; where exactly a kill or a
 *   cancel lands is up to the machine.
 *   `MODEL_COMPARE=each` compares every snapshot as soon as it is published.
 * - `npm run test:soak` runs new seeds for `SOAK_SECONDS` (default 3600) and prints what it did.
 */
import { expect, test } from 'vitest';
import type { Dialect } from '../../src/capture/types.ts';
import { runModel } from './model/run.ts';
import type { Step } from './model/steps.ts';
import { noCounts } from './model/world.ts';

const dialects: readonly Dialect[] = ['firecracker', 'aenv', 'e2b'];
const { MODEL_SEED, MODEL_STEPS, MODEL_DIALECT, MODEL_COMPARE, SOAK_SECONDS } = process.env;
const soakSeconds = Number(SOAK_SECONDS ?? 0);

const wanted = dialects.filter((dialect) => (MODEL_DIALECT ?? dialect) === dialect);

test.skipIf(soakSeconds > 0).each(wanted)(
  'dialect %s: whatever fails, every snapshot restores as the guest was',
  { timeout: 0 },
  async (dialect) => {
    const seed = Number(MODEL_SEED ?? 20_251_130);
    const counts = noCounts();
    const steps = Number(MODEL_STEPS ?? 14);
    console.log(`MODEL_SEED=${seed} MODEL_STEPS=${steps} MODEL_DIALECT=${dialect}`);
    const compareEach = MODEL_COMPARE === 'each';
    await runModel({ seed, dialect, steps, counts, compareEach, comparedMax: 6 });
    console.log(JSON.stringify(counts));
    expect(counts.published).toBeGreaterThan(0);
  },
);

test.runIf(soakSeconds > 0)('soak', { timeout: 0 }, async () => {
  const began = performance.now();
  const seconds = (): number => Math.round((performance.now() - began) / 1000);
  const counts = noCounts();
  const stepCounts: Partial<Record<Step, number>> = {};
  const failures: string[] = [];
  let seed = Number(MODEL_SEED ?? 1);
  let runs = 0;
  for (; seconds() < soakSeconds; seed += 1, runs += 1) {
    const dialect = dialects[seed % dialects.length] ?? 'e2b';
    const steps = Number(MODEL_STEPS ?? 60);
    await runModel({ seed, dialect, steps, counts, stepCounts, comparedMax: 20 }).catch(
      (error: unknown) => {
        failures.push(`seed ${seed} ${dialect}`);
        console.log(String(error));
      },
    );
    if (runs % 10 === 0) console.log(`${seconds()} s, seed ${seed}: ${JSON.stringify(counts)}`);
  }
  console.log(`${seconds()} s, ${runs} runs, seeds up to ${seed - 1}`);
  console.log(JSON.stringify(counts), JSON.stringify(stepCounts));
  console.log(`failures: ${failures.length} ${failures.join(', ')}`);
  expect(failures).toEqual([]);
});
