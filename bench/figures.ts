/** What benches of whole captures share: results, their figures as text, and timed restores. */
import { rmSync } from 'node:fs';
import type { CaptureResult, CaptureView } from '../src/capture/types.ts';
import { median } from './bare.ts';
import type { BenchDaemon } from './daemon.ts';

export type Print = (line: string) => void;

export function resultOf(view: CaptureView): CaptureResult {
  if (view.result === null) throw new Error('the capture has no result');
  return view.result;
}

export const ms = (value: number): string => `${value.toFixed(1)} ms`;
export const mib = (bytes: number): string => `${(bytes / 1024 / 1024).toFixed(1)} MiB`;

/** Median of three, milliseconds; leaves nothing. */
export async function restoreMs(daemon: BenchDaemon, snapshot: string): Promise<number> {
  const times: number[] = [];
  for (let round = 0; round < 3; round++) {
    const { tookMs, folder } = await daemon.restore(snapshot);
    times.push(tookMs);
    rmSync(folder, { recursive: true });
  }
  return median(times);
}
