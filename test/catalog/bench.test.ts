import { expect, test } from 'vitest';
import { catalogBench, sizes } from '../../bench/catalog.bench.ts';

test('the bench of the catalog runs at its small size', async () => {
  const lines: string[] = [];
  const size = { ...sizes.smoke, operations: 5, retired: 10 };
  await catalogBench(size, (line) => lines.push(line), { dialects: ['sqlite'] });
  expect(lines.join('\n')).toMatch(/publish, low reuse .* p99 ×/);
  expect(lines.join('\n')).toContain('checksum of the work');
});
