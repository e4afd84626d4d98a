import { mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { epochsBench, sizes } from '../../bench/epochs.bench.ts';
import { epochsSvg } from '../../bench/plot.ts';

test(
  'the epochs bench runs each part, keeps chains short and plots them',
  { timeout: 240_000 },
  async () => {
    const folder = mkdtempSync(join(tmpdir(), 'varve-epochs-'));
    const plotFile = join(folder, 'epochs.svg');
    const lines: string[] = [];
    try {
      await epochsBench(sizes.smoke, (line) => lines.push(line), { plotFile });
      expect(readFileSync(plotFile, 'utf8').match(/<polyline /g)).toHaveLength(5);
    } finally {
      rmSync(folder, { recursive: true });
    }
    for (const line of lines) expect(line).not.toMatch(/NaN|undefined/);
    const last = lines.find((line) => line.startsWith('8 captures'));
    expect(Number(/at most (\d+)/.exec(last ?? '')?.[1])).toBeLessThanOrEqual(4);
    expect(Number(/rewritten by compaction (\S+) MiB/.exec(last ?? '')?.[1])).toBeGreaterThan(0);
    const kinds = [
      'chain',
      'restore before',
      'restore after',
      'tracking modes',
      'mincore',
      'dirty, ',
    ];
    for (const kind of [...kinds, 'pagemap', 'zstd', 'steady-state']) {
      expect(
        lines.some((line) => line.startsWith(kind)),
        kind,
      ).toBe(true);
    }
  },
);

test('the plot puts the last capture at the right edge and the limit at the top', () => {
  const svg = epochsSvg(
    [
      { epoch: 1, depth: 1, capturedBytes: 1024 * 1024, rewrittenBytes: 0 },
      { epoch: 2, depth: 2, capturedBytes: 2 * 1024 * 1024, rewrittenBytes: 1024 * 1024 },
    ],
    4,
  );
  expect(svg).toContain('points="384.0,216.0 704.0,193.5"');
  expect(svg).toContain('points="384.0,411.0 704.0,366.0"');
});
