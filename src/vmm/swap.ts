/** Whether the host swaps, which decides what tracking mode `mincore` may rely on. */
import { readFile } from 'node:fs/promises';
import { err, ok, type Result } from '../result.ts';
import { bytes, type Bytes } from '../units.ts';
import { vmmError, type VmmError } from './errors.ts';

export interface SwapArea {
  readonly name: string;
  readonly sizeBytes: Bytes;
  readonly usedBytes: Bytes;
}

/** The host's swap areas, from `/proc/swaps` (sizes there are KiB). */
export async function readSwapAreas(path = '/proc/swaps'): Promise<readonly SwapArea[]> {
  return parseSwaps(await readFile(path, 'utf8'));
}

export function parseSwaps(text: string): SwapArea[] {
  const areas: SwapArea[] = [];
  for (const line of text.split('\n').slice(1)) {
    const fields = /^(\S+)\s+\S+\s+(\d+)\s+(\d+)/.exec(line);
    if (fields === null) continue;
    const [, name, size, used] = fields;
    // The kernel writes a space in a name as \040.
    const readable = (name ?? '').replace(/\\040/g, ' ');
    areas.push({
      name: readable,
      sizeBytes: bytes(Number(size) * 1024),
      usedBytes: bytes(Number(used) * 1024),
    });
  }
  return areas;
}

/**
 * Residency as the VMM sees it (mincore) calls a swapped page absent: its bytes would be lost.
 * Refused while the host has swap, unless the source sees swapped pages itself.
 */
export function checkSwap(
  areas: readonly SwapArea[],
  seesSwapped: boolean,
): Result<void, VmmError> {
  if (seesSwapped || areas.length === 0) return ok(undefined);
  const names = areas.map((area) => area.name).join(', ');
  const message =
    `tracking mode mincore would lose swapped pages, and this host swaps (${names}): ` +
    'turn swap off (swapoff -a), or use tracking mode dirty';
  return err(vmmError('swap-on', message));
}
