/**
 * The frozen time of one capture: from sending the pause to the answer to the resume.
 *
 * | state    | begin            | end                                 |
 * |----------|------------------|-------------------------------------|
 * | idle     | pausing          | over: there is nothing to end       |
 * | over     | refused          | nothing                             |
 * | pausing  | -                | waits for the pause, then as paused |
 * | refused  | -                | nothing: the VM does not stand      |
 * | paused   | -                | resuming → resumed or stuck         |
 * | resuming | -                | joins the one that runs             |
 * | resumed  | -                | nothing                             |
 * | stuck    | -                | nothing: recovery goes on with it   |
 *
 * F1: one resume per pause, whatever the outcome and however often `end` is called.
 * F2: no error is proof that a pause had no effect: the VM's state is asked. Only a VM that does not
 *     stand, after a request that was answered, was refused its pause. A pause whose answer never came
 *     may still come: it counts as one, and after the resume the state is asked again.
 * F3: a VM that its owner had paused is never begun, so never ended.
 * F4: what was ended never begins: an abort that comes first wins.
 */
import type { Clock } from '../clock.ts';
import { Failure, assert, type FailureDetail } from '../result.ts';
import { stopwatch, type Span } from './meter.ts';

export interface FreezeActions {
  /** Durable before the pause is sent. */
  readonly intend: () => void;
  readonly pause: () => Promise<void>;
  /** True when the VMM answered the pause that failed so: it takes no effect later. */
  readonly wasAnswered: (error: unknown) => boolean;
  /** Whether the VM stands now; rejects where its VMM does not say. */
  readonly isPaused: () => Promise<boolean>;
  /** Resolves when the VM runs. */
  readonly resume: () => Promise<void>;
  /** True when the VM is gone, so that trying again is pointless. */
  readonly surelyGone: (error: unknown) => boolean;
  /** After the VM runs, or is gone. */
  readonly done: () => void;
}

type State = 'idle' | 'over' | 'pausing' | 'refused' | 'paused' | 'resuming' | 'resumed' | 'stuck';

/** Waits between tries of a resume that failed, milliseconds. After the last, others take over. */
export const resumeRetryWaitsMs = [50, 200, 500] as const;

export class Freeze {
  readonly #actions: FreezeActions;
  readonly #clock: Clock;
  readonly #now: () => number;
  #state: State = 'idle';
  #startMs = 0;
  #endMs: number | undefined;
  #beginning: Promise<void> | undefined;
  #ending: Promise<void> | undefined;
  #failure: unknown;
  /** The pause may have been put off, and not dropped. */
  #mayComeLate = false;

  /** @param now the capture's own clock, milliseconds */
  constructor(actions: FreezeActions, clock: Clock, now?: () => number) {
    this.#actions = actions;
    this.#clock = clock;
    this.#now = now ?? stopwatch(clock);
  }

  get state(): State {
    return this.#state;
  }

  /** The frozen time so far; undefined when the VM was never stopped. */
  get span(): Span | undefined {
    if (['idle', 'over', 'refused'].includes(this.#state)) return undefined;
    return { startMs: this.#startMs, endMs: this.#endMs ?? this.#now() };
  }

  /** Why the VM could not be resumed, when `state` is `stuck`; in others, what failed after that. */
  get failure(): unknown {
    return this.#failure;
  }

  /** Fails as the pause fails, and where `end` came first. */
  begin(): Promise<void> {
    if (this.#state === 'over') {
      return Promise.reject(new Error('the capture ended before its VM was paused'));
    }
    assert(this.#state === 'idle', 'a capture pauses once');
    this.#actions.intend();
    this.#startMs = this.#now();
    this.#state = 'pausing';
    this.#beginning = this.#pause();
    return this.#beginning;
  }

  async #pause(): Promise<void> {
    try {
      await this.#actions.pause();
      this.#state = 'paused';
    } catch (error) {
      this.#mayComeLate = !this.#actions.wasAnswered(error);
      if (this.#mayComeLate || (await this.#stands())) {
        this.#state = 'paused';
      } else {
        this.#state = 'refused';
        this.#done();
      }
      throw error;
    }
  }

  /** For all that is known. */
  #stands(): Promise<boolean> {
    return this.#actions.isPaused().catch(() => true);
  }

  /**
   * Never rejects: a VM that can't be resumed is `stuck`, and the capture's own error stays the one
   * reported.
   */
  end(): Promise<void> {
    this.#ending ??= this.#endOnce();
    return this.#ending;
  }

  async #endOnce(): Promise<void> {
    if (this.#state === 'idle') {
      this.#state = 'over';
      return;
    }
    await this.#beginning?.catch(() => undefined);
    // Read again: the pause has been answered meanwhile.
    if ((this.#state as State) !== 'paused') return;
    this.#state = 'resuming';
    await this.#resume();
  }

  async #resume(): Promise<void> {
    for (let attempt = 0; ; attempt++) {
      try {
        await this.#actions.resume();
        if (this.#mayComeLate && (await this.#stands())) throw new Error('the VM was paused late');
        this.#endMs = this.#now();
        this.#state = 'resumed';
        this.#failure = undefined;
        break;
      } catch (error) {
        this.#failure = error;
        const gone = this.#actions.surelyGone(error);
        const wait = resumeRetryWaitsMs[attempt];
        if (gone || wait === undefined) {
          this.#endMs = this.#now();
          this.#state = 'stuck';
          if (gone) break;
          return;
        }
        await this.#clock.sleep(wait, new AbortController().signal);
      }
    }
    this.#done();
  }

  /** F1: what fails here is no failure of the resume, which must not be sent again for it. */
  #done(): void {
    try {
      this.#actions.done();
    } catch (error) {
      this.#failure = error;
    }
  }
}

/** Whether `error` is an expected failure of one of these kinds. */
export function failedWith(error: unknown, ...kinds: readonly string[]): boolean {
  return error instanceof Failure && kinds.includes((error.detail as FailureDetail).kind);
}
