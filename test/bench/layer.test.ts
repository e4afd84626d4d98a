import { execFileSync } from 'node:child_process';
import { expect, test } from 'vitest';
import { projectRoot } from '../../bench/daemon.ts';
import { layerBench, sizes } from '../../bench/layer.bench.ts';

test('the layer bench runs, and prints a line for each goal', { timeout: 240_000 }, async () => {
  execFileSync('make', ['--no-print-directory', '-C', `${projectRoot}/native/bench`]);
  const lines: string[] = [];
  await layerBench(sizes.smoke, (line) => lines.push(line));
  expect(lines).toHaveLength(6);
  for (const line of lines) expect(line).not.toMatch(/NaN|undefined|WRONG/);
});
