/** A small VM with our client bound to it. */
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { expect } from 'vitest';
import type { PageBitmap } from '../../src/memory.ts';
import { launchMiniVm, type LaunchOptions, type MiniVm } from '../../src/minivm/launch.ts';
import type { Result } from '../../src/result.ts';
import { hasPage } from '../../src/vmm/bitmap.ts';
import { VmmClient } from '../../src/vmm/client.ts';
import type { VmmError } from '../../src/vmm/errors.ts';
import { identify, type ProcessIdentity } from '../../src/vmm/identity.ts';
import { openDirtySource } from '../../src/vmm/open-source.ts';
import { probeVmm, type VmmFacts } from '../../src/vmm/probe.ts';
import type { DirtySource, FetchedSet, FetchRequest, TrackingMode } from '../../src/vmm/source.ts';
import { readSwapAreas, type SwapArea } from '../../src/vmm/swap.ts';
import { never } from './raw-server.ts';

export interface Attached extends AsyncDisposable {
  readonly vm: MiniVm;
  readonly client: VmmClient;
  readonly identity: ProcessIdentity;
  readonly facts: VmmFacts;
  /** A folder for snapshots; removed at the end. */
  readonly directory: string;
  open(mode: TrackingMode): Promise<Result<DirtySource, VmmError>>;
  source(mode: TrackingMode): Promise<DirtySource>;
  /** Fetches from a paused VM into new files. */
  fetch(source: DirtySource, more?: Partial<FetchRequest>): Promise<FetchedSet>;
  newFetch(more?: Partial<FetchRequest>): FetchRequest;
}

/** @param swapsPath read in place of /proc/swaps; without it the host does not swap */
export async function attach(options: LaunchOptions, swapsPath?: string): Promise<Attached> {
  const vm = await launchMiniVm(options);
  const directory = await mkdtemp(join(tmpdir(), 'varve-source-'));
  const identity = must(identify(vm.socketPath));
  const client = new VmmClient({ socketPath: vm.socketPath });
  client.bind(identity);
  const facts = must(await probeVmm(client, never));
  let count = 0;
  const readSwaps = (): Promise<readonly SwapArea[]> =>
    swapsPath === undefined ? Promise.resolve([]) : readSwapAreas(swapsPath);
  const open = (mode: TrackingMode): Promise<Result<DirtySource, VmmError>> =>
    openDirtySource({ client, facts, identity, mode, readSwaps });
  const newFetch = (more: Partial<FetchRequest> = {}): FetchRequest => {
    count += 1;
    return {
      statePath: join(directory, `state-${count}`),
      memFilePath: join(directory, `memory-${count}`),
      parent: 'none',
      stateSaved: () => Promise.resolve(),
      signal: never,
      ...more,
    };
  };
  return {
    vm,
    client,
    identity,
    facts,
    directory,
    open,
    source: async (mode) => must(await open(mode)),
    newFetch,
    fetch: async (source, more) => must(await source.fetch(newFetch(more))),
    [Symbol.asyncDispose]: async () => {
      identity[Symbol.dispose]();
      await vm[Symbol.asyncDispose]();
      await rm(directory, { recursive: true, force: true });
    },
  };
}

export function must<T>(result: Result<T, VmmError>): T {
  if (!result.ok) throw new Error(`${result.error.kind}: ${result.error.message}`);
  return result.value;
}

export function errorOf(result: Result<unknown, VmmError>): VmmError {
  expect(result.ok).toBe(false);
  if (result.ok) throw new Error('it did not fail');
  return result.error;
}

export function pagesOf(bitmap: PageBitmap | null): number[] {
  const pages: number[] = [];
  for (let page = 0; page < (bitmap?.pageCount ?? 0); page += 1) {
    if (bitmap !== null && hasPage(bitmap, page)) pages.push(page);
  }
  return pages;
}

/** A set of the small VM's as page numbers. Its words are region after region. */
export function pagesOfWords(words: BigUint64Array, regionPages: readonly number[]): number[] {
  const pages: number[] = [];
  let word = 0;
  let first = 0;
  for (const count of regionPages) {
    for (let page = 0; page < count; page += 1) {
      const bits = words[word + Math.floor(page / 64)] ?? 0n;
      if (((bits >> BigInt(page % 64)) & 1n) === 1n) pages.push(first + page);
    }
    word += Math.ceil(count / 64);
    first += count;
  }
  return pages;
}
