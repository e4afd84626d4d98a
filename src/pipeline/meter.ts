import type { Clock } from '../clock.ts';
import type { StageName } from '../stage-names.ts';

/** A stretch of time on the capture's own clock, milliseconds. */
export interface Span {
  readonly startMs: number;
  readonly endMs: number;
}

/** What one stage of one capture did. Times are milliseconds since the capture began. */
export interface StageMeasure {
  readonly stage: StageName;
  readonly startedMs: number;
  readonly endedMs: number;
  readonly busyMs: number;
  readonly items: number;
  readonly bytes: number;
}

/** Counts the items and bytes of one stage, and the time in which any item was being worked on. */
export class StageMeter {
  readonly stage: StageName;
  readonly #now: () => number;
  readonly #onChange: (stage: StageName, state: 'started' | 'ended') => void;
  #started: number | undefined;
  #ended: number | undefined;
  #busy = 0;
  #active = 0;
  #activeSince = 0;
  #items = 0;
  #bytes = 0;

  constructor(
    stage: StageName,
    now: () => number,
    onChange: (stage: StageName, state: 'started' | 'ended') => void,
  ) {
    this.stage = stage;
    this.#now = now;
    this.#onChange = onChange;
  }

  /** Marks the start of the stage; the first call counts. */
  start(): void {
    if (this.#started !== undefined) return;
    this.#started = this.#now();
    this.#onChange(this.stage, 'started');
  }

  /** Marks the end of the stage; the first call counts. */
  end(): void {
    if (this.#started === undefined || this.#ended !== undefined) return;
    this.#ended = this.#now();
    this.#onChange(this.stage, 'ended');
  }

  /** Times `work` as one item of `bytes` bytes. A failing item counts as time, not as an item. */
  async item<T>(bytes: number, work: () => Promise<T>): Promise<T> {
    this.start();
    if (this.#active++ === 0) this.#activeSince = this.#now();
    try {
      const value = await work();
      this.#items += 1;
      this.#bytes += bytes;
      return value;
    } finally {
      if (--this.#active === 0) this.#busy += this.#now() - this.#activeSince;
    }
  }

  measure(): StageMeasure | undefined {
    if (this.#started === undefined) return undefined;
    return {
      stage: this.stage,
      startedMs: this.#started,
      endedMs: this.#ended ?? this.#now(),
      busyMs: this.#busy + (this.#active > 0 ? this.#now() - this.#activeSince : 0),
      items: this.#items,
      bytes: this.#bytes,
    };
  }
}

/** Milliseconds since it was made, from the monotonic clock. */
export function stopwatch(clock: Clock): () => number {
  const start = clock.monotonicNs();
  return () => Number(clock.monotonicNs() - start) / 1e6;
}

/** How much of `a` lies in `b`, milliseconds. */
export function overlapMs(a: Span, b: Span): number {
  return Math.max(0, Math.min(a.endMs, b.endMs) - Math.max(a.startMs, b.startMs));
}
