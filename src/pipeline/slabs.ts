/**
 * The memory that guest bytes pass through: one shared arena, allocated and touched at start, cut
 * into slabs.
 *
 * S1: a slab has one holder at a time; the sum of all slabs never changes.
 * S2: a free slab goes to the waiting holder that has the fewest, the longest-waiting first among
 *     equals: a huge capture cannot starve a small one.
 * S3: a holder's `release` gives back everything it has, and rejects what it waits for.
 */
import { assert } from '../result.ts';
import type { QueueGauge } from './queue.ts';

export interface Slab {
  readonly index: number;
  /** Where the slab starts in the arena, bytes. */
  readonly offset: number;
  /** The slab's memory. Shared with the workers; never copied into the V8 heap. */
  readonly view: Uint8Array;
}

interface Waiter {
  readonly holder: SlabHolder;
  readonly give: (slab: Slab) => void;
  readonly refuse: (reason: unknown) => void;
}

export class SlabArena {
  readonly buffer: SharedArrayBuffer;
  readonly slabBytes: number;
  readonly slabCount: number;
  readonly #free: Slab[] = [];
  readonly #waiting: Waiter[] = [];
  readonly #gauge: QueueGauge;

  /** @param touch makes every page of the arena resident, so that no capture pays for it. */
  constructor(options: {
    readonly budgetBytes: number;
    readonly slabBytes: number;
    readonly touch: (view: Uint8Array) => void;
    readonly gauge: QueueGauge;
  }) {
    this.slabBytes = options.slabBytes;
    this.slabCount = Math.max(2, Math.floor(options.budgetBytes / options.slabBytes));
    this.buffer = new SharedArrayBuffer(this.slabCount * this.slabBytes);
    this.#gauge = options.gauge;
    options.touch(new Uint8Array(this.buffer));
    for (let index = this.slabCount - 1; index >= 0; index--) {
      const offset = index * this.slabBytes;
      const view = new Uint8Array(this.buffer, offset, this.slabBytes);
      this.#free.push({ index, offset, view });
    }
  }

  get freeCount(): number {
    return this.#free.length;
  }

  holder(): SlabHolder {
    return new SlabHolder(this);
  }

  /** @internal Called by holders. */
  take(holder: SlabHolder): Promise<Slab> {
    const slab = this.#free.pop();
    if (slab !== undefined) {
      this.#report();
      return Promise.resolve(slab);
    }
    holder.starved();
    return new Promise((give, refuse) => this.#waiting.push({ holder, give, refuse }));
  }

  /** @internal Called by holders. */
  giveBack(slab: Slab): void {
    const next = this.#neediest();
    if (next === undefined) {
      this.#free.push(slab);
    } else {
      this.#waiting.splice(this.#waiting.indexOf(next), 1);
      next.holder.granted(slab);
      next.give(slab);
    }
    this.#report();
  }

  /** @internal Called by holders. */
  forget(holder: SlabHolder, reason: unknown): void {
    const gone = this.#waiting.filter((waiter) => waiter.holder === holder);
    for (const waiter of gone) {
      this.#waiting.splice(this.#waiting.indexOf(waiter), 1);
      waiter.refuse(reason);
    }
  }

  #neediest(): Waiter | undefined {
    let best: Waiter | undefined;
    for (const waiter of this.#waiting) {
      if (best === undefined || waiter.holder.heldCount < best.holder.heldCount) best = waiter;
    }
    return best;
  }

  #report(): void {
    this.#gauge((this.slabCount - this.#free.length) * this.slabBytes);
  }
}

/** One capture's slabs. */
export class SlabHolder {
  readonly #arena: SlabArena;
  readonly #held = new Set<Slab>();
  #onShort: (() => void)[] = [];
  #closedBy: Error | undefined;

  constructor(arena: SlabArena) {
    this.#arena = arena;
  }

  /** @internal Called by the arena. */
  starved(): void {
    const told = this.#onShort;
    this.#onShort = [];
    for (const tell of told) tell();
  }

  /** Resolves when an `acquire` has to wait from now on, or the holder is closed. */
  runsShort(): Promise<void> {
    if (this.#closedBy !== undefined) return Promise.resolve();
    return new Promise((resolve) => this.#onShort.push(resolve));
  }

  get heldCount(): number {
    return this.#held.size;
  }

  /** Waits for a slab. Rejects with the reason once the holder is closed. */
  async acquire(): Promise<Slab> {
    if (this.#closedBy !== undefined) throw this.#closedBy;
    const slab = await this.#arena.take(this);
    this.#held.add(slab);
    return slab;
  }

  /** @internal A slab was handed over while waiting: counts at once, so that sharing stays fair. */
  granted(slab: Slab): void {
    this.#held.add(slab);
  }

  holds(slab: Slab): boolean {
    return this.#held.has(slab);
  }

  release(slab: Slab): void {
    assert(this.#held.delete(slab), 'a slab is released by its holder, once');
    this.#arena.giveBack(slab);
  }

  /** Refuses waiting and later `acquire`s. Slabs in use stay held until `releaseAll`. */
  close(reason: Error): void {
    this.#closedBy ??= reason;
    this.starved();
    this.#arena.forget(this, this.#closedBy);
  }

  /** Gives back everything. Only when nothing reads or writes the slabs any more. */
  releaseAll(): void {
    for (const slab of [...this.#held]) this.release(slab);
  }
}
