/** One line on a terminal that is rewritten as work goes on; nothing where nobody watches. */

export interface ProgressLine extends Disposable {
  show(text: string): void;
  /** `what`, a bar and a share. */
  bar(what: string, done: number, total: number): void;
}

const BAR_CELLS = 30;
const REDRAW_MS = 80;

export function progressLine(stream: NodeJS.WriteStream = process.stderr): ProgressLine {
  let drawnAtMs = -Infinity;
  const draw = (text: string): void => {
    if (!stream.isTTY) return;
    const room = Math.max(20, stream.columns - 1);
    stream.write(`\r\x1b[K${text.slice(0, room)}`);
  };
  return {
    show: draw,
    bar(what, done, total) {
      const nowMs = performance.now();
      if (nowMs - drawnAtMs < REDRAW_MS && done < total) return;
      drawnAtMs = nowMs;
      const share = total === 0 ? 1 : Math.min(1, done / total);
      const full = Math.round(share * BAR_CELLS);
      const bar = `${'#'.repeat(full)}${'.'.repeat(BAR_CELLS - full)}`;
      draw(`${what} [${bar}] ${Math.round(share * 100)} %`);
    },
    [Symbol.dispose]() {
      if (stream.isTTY) stream.write('\r\x1b[K');
    },
  };
}
