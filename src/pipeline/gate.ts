/**
 * How many captures may be in a stage at once, of all VMs together.
 *
 * G1: at most `concurrency` are inside; at most `waitingMax` wait, in the order they came.
 * G2: one that is aborted while it waits leaves the queue at once.
 */
import { Failure } from '../result.ts';
import type { QueueGauge } from './queue.ts';

export interface GateOptions {
  /** Names the gate in the refusal. */
  readonly name: string;
  readonly concurrency: number;
  readonly waitingMax: number;
  readonly gauge: QueueGauge;
}

export class Gate {
  readonly #options: GateOptions;
  readonly #waiting: (() => void)[] = [];
  #inside = 0;

  constructor(options: GateOptions) {
    this.#options = options;
  }

  /**
   * Waits for a place. Fails with `busy` when the queue is full, with the signal's reason when
   * aborted.
   */
  async enter(signal: AbortSignal): Promise<Disposable> {
    signal.throwIfAborted();
    if (this.#inside < this.#options.concurrency) {
      this.#inside += 1;
    } else {
      await this.#wait(signal);
    }
    return { [Symbol.dispose]: once(() => this.#leave()) };
  }

  #wait(signal: AbortSignal): Promise<void> {
    const { name, waitingMax, gauge } = this.#options;
    if (this.#waiting.length >= waitingMax) {
      const message = `${waitingMax} captures wait for the ${name} stage already`;
      return Promise.reject(new Failure({ kind: 'busy', message }));
    }
    return new Promise((resolve, reject) => {
      const turn = (): void => {
        signal.removeEventListener('abort', aborted);
        gauge(this.#waiting.length);
        resolve();
      };
      const aborted = (): void => {
        this.#waiting.splice(this.#waiting.indexOf(turn), 1);
        gauge(this.#waiting.length);
        reject(signal.reason as Error);
      };
      signal.addEventListener('abort', aborted, { once: true });
      this.#waiting.push(turn);
      gauge(this.#waiting.length);
    });
  }

  /** The place goes to the first in the queue, else it is free. */
  #leave(): void {
    const next = this.#waiting.shift();
    if (next === undefined) this.#inside -= 1;
    else next();
  }
}

function once(action: () => void): () => void {
  let done = false;
  return () => {
    if (done) return;
    done = true;
    action();
  };
}
