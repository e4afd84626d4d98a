/** Several questions to one VMM at the same time. */

type Work<T> = (signal: AbortSignal) => Promise<T>;

/**
 * Does all at once and gives the results in order. The first failure aborts the others and is
 * thrown once all have ended: nothing goes on behind its back.
 */
export async function together<T extends readonly unknown[]>(
  signal: AbortSignal,
  ...works: { readonly [K in keyof T]: Work<T[K]> }
): Promise<T> {
  const stop = new AbortController();
  const both = AbortSignal.any([signal, stop.signal]);
  const failures: unknown[] = [];
  const running = works.map(async (work: Work<unknown>) => {
    try {
      return await work(both);
    } catch (error) {
      failures.push(error);
      stop.abort(error);
      return undefined;
    }
  });
  const results = await Promise.all(running);
  if (failures.length > 0) throw failures[0];
  return results as unknown as T;
}

/** Lets what was asked for be sent first. */
export const nextTurn = (): Promise<void> => new Promise((resolve) => void setImmediate(resolve));
