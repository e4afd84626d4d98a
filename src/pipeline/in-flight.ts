/**
 * Counts the items between two stages, for an earlier one that waits until a later one is done with
 * all of them. The wait also ends when an item fails or the signal is aborted: what it waits for
 * will not come then.
 */
export class InFlight {
  #count = 0;
  #failed: { readonly error: unknown } | undefined;
  #wake: () => void = () => undefined;

  /** An item is on its way. */
  sent(): void {
    this.#count += 1;
  }

  /** An item has arrived. */
  arrived(): void {
    this.#count -= 1;
    if (this.#count === 0) this.#wake();
  }

  /** An item was lost: whoever waits, or will, gets this error. The first counts. */
  fail(error: unknown): void {
    this.#failed ??= { error };
    this.#wake();
  }

  /** Resolves when nothing is on its way. One caller at a time. */
  async drained(signal: AbortSignal): Promise<void> {
    const woken = (): void => this.#wake();
    signal.addEventListener('abort', woken);
    try {
      for (;;) {
        signal.throwIfAborted();
        if (this.#failed !== undefined) throw this.#failed.error;
        if (this.#count === 0) return;
        await new Promise<void>((resolve) => (this.#wake = resolve));
      }
    } finally {
      signal.removeEventListener('abort', woken);
    }
  }
}
