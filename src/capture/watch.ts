/** A capture's events as a stream that ends with the capture, for as many watchers as there are. */
import type { CaptureEvent, CaptureView } from './types.ts';

interface Watched {
  readonly ended: Promise<void>;
  readonly progress: { listen(listener: (event: CaptureEvent) => void): () => void };
}

/**
 * Events kept for a watcher that does not read; older ones are dropped, the last status always
 * comes.
 */
const pendingMax = 256;

/**
 * How long a stage's event may wait for more of them, milliseconds. Telling each at once would take
 * the processor from the stages themselves, mostly while the VM is frozen.
 */
const stageEventWaitMs = 50;

export async function* watchRun(
  run: Watched | undefined,
  view: () => CaptureView | undefined,
  signal: AbortSignal,
): AsyncIterable<CaptureEvent> {
  const first = view();
  if (first === undefined) return;
  if (run === undefined) {
    yield { type: 'status', capture: first };
    return;
  }
  const pending: CaptureEvent[] = [{ type: 'status', capture: first }];
  let wake: () => void = () => undefined;
  let late: NodeJS.Timeout | undefined;
  const wakeLate = (): void => {
    late = undefined;
    wake();
  };
  const state = { ended: false };
  const stop = run.progress.listen((event) => {
    if (pending.length >= pendingMax) pending.shift();
    pending.push(event);
    if (event.type !== 'stage') wake();
    else late ??= setTimeout(wakeLate, stageEventWaitMs);
  });
  const onAbort = (): void => wake();
  signal.addEventListener('abort', onAbort);
  void run.ended.then(() => {
    state.ended = true;
    wake();
  });
  try {
    for (;;) {
      const event = pending.shift();
      if (event !== undefined) yield event;
      else if (state.ended) break;
      else await new Promise<void>((resolve) => (wake = resolve));
      signal.throwIfAborted();
    }
  } finally {
    stop();
    clearTimeout(late);
    signal.removeEventListener('abort', onAbort);
  }
  const last = view();
  if (last !== undefined) yield { type: 'status', capture: last };
}
