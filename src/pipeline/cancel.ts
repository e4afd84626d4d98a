/**
 * Cancel words: one 32-bit word a capture, in shared memory, polled by native loops between system
 * calls.
 */
export class CancelWords {
  readonly words: Int32Array<SharedArrayBuffer>;
  readonly #free: number[] = [];

  constructor(slots: number) {
    this.words = new Int32Array(new SharedArrayBuffer(slots * Int32Array.BYTES_PER_ELEMENT));
    for (let slot = slots - 1; slot >= 0; slot--) this.#free.push(slot);
  }

  /** A cleared word, or undefined when all are taken: the caller runs too many captures. */
  take(): CancelWord | undefined {
    const slot = this.#free.pop();
    if (slot === undefined) return undefined;
    Atomics.store(this.words, slot, 0);
    return {
      slot,
      set: () => Atomics.store(this.words, slot, 1),
      free: () => this.#free.push(slot),
    };
  }
}

export interface CancelWord {
  readonly slot: number;
  /** Stops the capture's native loops within their slice. */
  set(): void;
  /** Only when none of the capture's calls runs any more. */
  free(): void;
}
