/** What is tried with each VMM. */
import type { ResumeAfter, TrackingMode } from '../capture/types.ts';

export interface Case {
  readonly name: string;
  readonly mode: TrackingMode;
  /** `track_dirty_pages` of the machine, or of the load. */
  readonly tracked: boolean;
  /** `restored`: started from a snapshot that was captured of another VM before. */
  readonly origin: 'fresh' | 'restored';
  readonly memoryMib: number;
  readonly hugePages: boolean;
  readonly resumeAfter: ResumeAfter;
  readonly precopyRounds: number;
  /** Children that the last capture starts, as a fork. */
  readonly children: number;
  /**
   * Kinds with which Varve rightly refuses the case before anything is paused; empty where there is
   * no good reason to.
   */
  readonly mayRefuse: readonly string[];
}

const plain: Omit<Case, 'name'> = {
  mode: 'dirty',
  tracked: true,
  origin: 'fresh',
  memoryMib: 256,
  hugePages: false,
  resumeAfter: 'copy',
  precopyRounds: 0,
  children: 0,
  mayRefuse: [],
};

/** Over the gap below 4 GiB of every Firecracker, so that memory lies in two regions. */
export const twoRegionsMib = 4096;

export interface CaseOptions {
  readonly memoryMib: number;
  /** Also the cases of a guest whose memory lies in two regions: they write its size to disk. */
  readonly twoRegions: boolean;
}

export function allCases({ memoryMib, twoRegions }: CaseOptions): readonly Case[] {
  const unseen = ['tracking-unsupported'];
  const small: readonly Case[] = [
    { ...plain, name: 'dirty' },
    { ...plain, name: 'dirty, untracked', tracked: false, mayRefuse: ['tracking-off'] },
    { ...plain, name: 'mincore, tracked', mode: 'mincore' },
    { ...plain, name: 'mincore, untracked', mode: 'mincore', tracked: false, mayRefuse: unseen },
    { ...plain, name: 'pagemap, fresh', mode: 'pagemap', mayRefuse: unseen },
    { ...plain, name: 'dirty, restored', origin: 'restored' },
    { ...plain, name: 'mincore, restored', origin: 'restored', mode: 'mincore' },
    { ...plain, name: 'pagemap, restored', origin: 'restored', mode: 'pagemap', tracked: false },
    { ...plain, name: 'pagemap, restored, tracked', origin: 'restored', mode: 'pagemap' },
    { ...plain, name: 'resume after commit', resumeAfter: 'commit' },
    { ...plain, name: 'resume after publish', resumeAfter: 'publish' },
    { ...plain, name: 'pre-copy', precopyRounds: 2, mayRefuse: ['precopy-unsupported'] },
    {
      ...plain,
      name: 'pre-copy, mincore',
      mode: 'mincore',
      precopyRounds: 2,
      mayRefuse: ['precopy-unsupported'],
    },
    { ...plain, name: 'fork of two', children: 2 },
    { ...plain, name: 'fork of two, mincore', mode: 'mincore', children: 2 },
    { ...plain, name: 'huge pages, dirty', hugePages: true },
    {
      ...plain,
      name: 'huge pages, mincore',
      hugePages: true,
      mode: 'mincore',
      mayRefuse: unseen,
    },
  ];
  const cases = small.map((each) => ({ ...each, memoryMib }));
  if (!twoRegions) return cases;
  const large = { ...plain, memoryMib: Math.max(memoryMib, twoRegionsMib) };
  return [
    ...cases,
    { ...large, name: 'two regions, dirty' },
    { ...large, name: 'two regions, mincore', mode: 'mincore' },
    { ...large, name: 'two regions, pagemap', mode: 'pagemap', origin: 'restored' },
  ];
}
