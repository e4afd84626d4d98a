/**
 * Things to undo, last first, whatever happens. (Node 20 has no `AsyncDisposableStack`.) Every one
 * runs; the first failure is thrown after the last has run.
 */
export class Cleanups implements AsyncDisposable {
  readonly #all: (() => void | Promise<void>)[] = [];

  defer(cleanup: () => void | Promise<void>): void {
    this.#all.push(cleanup);
  }

  use(resource: Disposable): void {
    this.defer(() => resource[Symbol.dispose]());
  }

  useAsync(resource: AsyncDisposable): void {
    this.defer(async () => {
      await resource[Symbol.asyncDispose]();
    });
  }

  async [Symbol.asyncDispose](): Promise<void> {
    const failures: unknown[] = [];
    for (const cleanup of this.#all.splice(0).reverse()) {
      try {
        await cleanup();
      } catch (error) {
        failures.push(error);
      }
    }
    if (failures.length > 0) throw failures[0];
  }
}
