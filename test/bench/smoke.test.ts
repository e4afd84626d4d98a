import { execFileSync } from 'node:child_process';
import { expect, test } from 'vitest';
import { captureBench, sizes } from '../../bench/capture.bench.ts';
import { projectRoot } from '../../bench/daemon.ts';

test(
  'the capture bench runs, and prints a line for each budget and each exchange in C',
  { timeout: 240_000 },
  async () => {
    execFileSync('make', ['--no-print-directory', '-C', `${projectRoot}/native/bench`]);
    const lines: string[] = [];
    await captureBench(sizes.smoke, (line) => lines.push(line));
    expect(lines).toHaveLength(8);
    for (const line of lines) expect(line).not.toMatch(/NaN|undefined/);
  },
);
