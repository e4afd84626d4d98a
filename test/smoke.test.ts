import { expect, test } from 'vitest';
import { pagesExact, bytes } from '../src/units.ts';

test('a size that is not whole pages is refused', () => {
  expect(() => pagesExact(bytes(4097))).toThrow(RangeError);
});
