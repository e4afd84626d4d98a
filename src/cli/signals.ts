/**
 * Commands that take something (a hold, files, processes) give it back when they are asked to end: the
 * signal aborts their work, which cleans up as after any failure. A second signal ends the process.
 */
import { constants } from 'node:os';
import { Failure } from '../result.ts';

const endings = ['SIGINT', 'SIGTERM', 'SIGHUP'] as const;
type Ending = (typeof endings)[number];

export interface Interrupted {
  readonly kind: 'interrupted';
  readonly message: string;
  /** 128 and the signal's number, as shells have it. */
  readonly exitCode: number;
}

const interruption = (name: Ending): Failure<Interrupted> =>
  new Failure({
    kind: 'interrupted',
    message: `ended by ${name}; what it had taken is given back`,
    exitCode: 128 + constants.signals[name],
  });

/** Rejects with `Interrupted` where a signal ended the work, whatever the work said of it. */
export async function untilSignal<T>(work: (signal: AbortSignal) => Promise<T>): Promise<T> {
  const ending = new AbortController();
  const listeners = endings.map((name) => {
    const listener = (): void => ending.abort(interruption(name));
    process.once(name, listener);
    return () => process.off(name, listener);
  });
  try {
    const value = await work(ending.signal);
    ending.signal.throwIfAborted();
    return value;
  } catch (error) {
    throw ending.signal.aborted ? ending.signal.reason : error;
  } finally {
    for (const stop of listeners) stop();
  }
}
