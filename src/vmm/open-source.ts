/** Chooses the dirty-set source of a VM, or says why its mode is not possible. */
import { err, ok, type Result } from '../result.ts';
import type { MemoryLayout } from '../memory.ts';
import { readVmas, writableRuns } from './address-map.ts';
import type { VmmClient } from './client.ts';
import { VmmEpochs } from './epochs.ts';
import { vmmError, type VmmError } from './errors.ts';
import { FileSource } from './file-source.ts';
import type { ProcessIdentity } from './identity.ts';
import { trackingOff, type VmmFacts } from './probe.ts';
import { ProcessSource } from './process-source.ts';
import type { DirtySource, TrackingMode } from './source.ts';
import { requireNoSwap } from './still-safe.ts';
import type { SwapArea } from './swap.ts';

export interface OpenSourceOptions {
  readonly client: VmmClient;
  readonly facts: VmmFacts;
  readonly identity: ProcessIdentity;
  readonly mode: TrackingMode;
  /** The host's swap areas: `readSwapAreas`. Asked now, and again before each capture. */
  readonly readSwaps: () => Promise<readonly SwapArea[]>;
  /** Where this very process's memory was found to be before. */
  readonly recalled?: MemoryLayout | undefined;
}

/**
 * | mode      | `firecracker`                    | `aenv`, `e2b`                  |
 * |-----------|----------------------------------|--------------------------------|
 * | `dirty`   | Diff file; needs tracking        | the VMM's set; needs tracking  |
 * | `mincore` | page tables from outside; a file | page tables from outside       |
 * |           | until the memory is found        |                                |
 * | `pagemap` | page tables, restored from file  | page tables, restored from file |
 */
export async function openDirtySource(
  options: OpenSourceOptions,
): Promise<Result<DirtySource, VmmError>> {
  const { client, facts, identity, mode, readSwaps } = options;
  if (mode === 'dirty' && !facts.machineConfig.track_dirty_pages) {
    return err(trackingOff(client.socketPath));
  }
  if (hugePages(facts) && mode !== 'dirty') {
    const { socketPath } = client;
    const message = `tracking mode ${mode} cannot see huge pages (${socketPath}): use dirty`;
    return err(vmmError('tracking-unsupported', message, { socketPath }));
  }
  const epochs = facts.capabilities.dirtyEpochs ? new VmmEpochs(client) : null;
  const recalled = await stillMapped(identity.pid, options.recalled);
  const deps = { client, facts, identity, epochs, readSwaps, recalled };
  const source: DirtySource =
    facts.dialect === 'firecracker' ? new FileSource(deps, mode) : new ProcessSource(deps, mode);
  const swap = await requireNoSwap(source, readSwaps);
  return swap.ok ? ok(source) : swap;
}

/** A layout that the address map no longer bears out is looked for anew. */
async function stillMapped(
  pid: number,
  layout: MemoryLayout | undefined,
): Promise<MemoryLayout | null> {
  if (layout === undefined) return null;
  const vmas = await readVmas(pid);
  if (!vmas.ok) return null;
  const runs = writableRuns(vmas.value);
  const isMapped = layout.regions.every(({ hostAddress, length }) =>
    runs.some((run) => run.start <= hostAddress && hostAddress + BigInt(length) <= run.end),
  );
  return isMapped ? layout : null;
}

function hugePages(facts: VmmFacts): boolean {
  const kind = facts.machineConfig.huge_pages;
  return kind !== undefined && kind !== 'None';
}
