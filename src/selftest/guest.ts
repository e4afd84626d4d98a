/**
 * The project's bare guest (`native/guest/`) as its host sees it: what it is told on the kernel
 * command line, and the lines it prints to the serial port.
 */
import { existsSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { Failure } from '../result.ts';

/** What the guest is told. Source: `native/guest/guest.c`. */
export interface GuestSettings {
  /** Pages that a round writes; 0 leaves memory alone. */
  readonly pages: number;
  /** Pages that the first round writes. */
  readonly first: number;
  /** Between rounds, milliseconds. */
  readonly pauseMs: number;
  readonly seed: number;
  /** Physical addresses to choose pages from, ends exclusive; all of memory where there are none. */
  readonly ranges: readonly { readonly start: number; readonly end: number }[];
}

/** One line of the guest. */
export interface GuestRound {
  /** From 1; goes on in a restored VM. */
  readonly round: number;
  readonly wrotePages: number;
  /** Pages that had anything but what an earlier round had left there. */
  readonly badPages: number;
  /** The longest time in this round's wait that the guest did not run, microseconds. */
  readonly longestUs: number;
}

export function kernelCommandLine(settings: GuestSettings): string {
  const hex = (value: number): string => `0x${value.toString(16)}`;
  return [
    `varve.pages=${settings.pages}`,
    `varve.first=${settings.first}`,
    `varve.pause=${settings.pauseMs}`,
    `varve.seed=${settings.seed}`,
    ...settings.ranges.map(({ start, end }) => `varve.range=${hex(start)}-${hex(end)}`),
  ].join(' ');
}

/** The built guest. Throws `Failure` where it is not. */
export function guestKernelPath(): string {
  for (let at = import.meta.dirname; dirname(at) !== at; at = dirname(at)) {
    const candidate = join(at, 'build', 'Release', 'varve-guest');
    if (existsSync(candidate)) return candidate;
  }
  const message = 'the bare guest is not built: run npm run native:build';
  throw new Failure({ kind: 'guest-missing', message });
}

const lineShape = /round=(\d+) wrote=(\d+) bad=(\d+) longest_us=(\d+)$/;

/** Undefined for any other line. */
export function parseRound(line: string): GuestRound | undefined {
  const match = lineShape.exec(line.trimEnd());
  if (match === null) return undefined;
  const [round = 0, wrotePages = 0, badPages = 0, longestUs = 0] = match.slice(1).map(Number);
  return { round, wrotePages, badPages, longestUs };
}

/** All that one VM's guest has said so far. */
export class GuestLines {
  last: GuestRound | null = null;
  /** Over all its rounds. */
  badPages = 0;
  #longestUs = 0;
  readonly #waiting = new Set<() => void>();

  take(line: string): void {
    const round = parseRound(line);
    if (round === undefined) return;
    this.last = round;
    this.badPages += round.badPages;
    this.#longestUs = Math.max(this.#longestUs, round.longestUs);
    for (const wake of [...this.#waiting]) wake();
  }

  /** The longest standstill since the last call, microseconds. */
  takeLongestUs(): number {
    const longest = this.#longestUs;
    this.#longestUs = 0;
    return longest;
  }

  /**
   * Resolves once the guest has finished so many rounds more. Rejects with the signal's reason.
   */
  async more(rounds: number, signal: AbortSignal): Promise<GuestRound> {
    let start = this.last?.round ?? null;
    for (;;) {
      // A restored guest's first line says where it goes on from.
      if (this.last !== null) {
        start ??= this.last.round - 1;
        if (this.last.round - start >= rounds) return this.last;
      }
      await this.#next(signal);
    }
  }

  async #next(signal: AbortSignal): Promise<void> {
    signal.throwIfAborted();
    await new Promise<void>((resolve, reject) => {
      const settle = (act: () => void): void => {
        this.#waiting.delete(wake);
        signal.removeEventListener('abort', onAbort);
        act();
      };
      const wake = (): void => settle(resolve);
      const onAbort = (): void => settle(() => reject(signal.reason as Error));
      this.#waiting.add(wake);
      signal.addEventListener('abort', onAbort, { once: true });
    });
  }
}
