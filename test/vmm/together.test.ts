import { expect, test } from 'vitest';
import { together } from '../../src/vmm/together.ts';

test('results come in order, whichever ends first', async () => {
  let release: () => void = () => undefined;
  const gate = new Promise<void>((resolve) => (release = resolve));
  const both = together(
    new AbortController().signal,
    async (signal: AbortSignal) => {
      await gate;
      return signal.aborted;
    },
    (signal: AbortSignal) => {
      release();
      return Promise.resolve(signal.aborted ? 'late' : 'first');
    },
  );
  expect(await both).toEqual([false, 'first']);
});

test('the first failure aborts the others, and is thrown once they have ended', async () => {
  const broke = new Error('refused');
  let ended = false;
  const both = together(
    new AbortController().signal,
    (signal: AbortSignal) =>
      new Promise<void>((resolve) => {
        signal.addEventListener('abort', () =>
          setImmediate(() => {
            ended = true;
            resolve();
          }),
        );
      }),
    () => Promise.reject(broke),
  );
  await expect(both).rejects.toBe(broke);
  expect(ended).toBe(true);
});
