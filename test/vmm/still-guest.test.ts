import { mkdir, mkdtemp, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { describe, expect, test } from 'vitest';
import { systemClock } from '../../src/clock.ts';
import { launchMiniVm, type MiniVm } from '../../src/minivm/launch.ts';
import { runsSources, threadRuns, type RunsSource } from '../../src/native/threads.ts';
import { Failure, type FailureDetail } from '../../src/result.ts';
import { StillGuest } from '../../src/vmm/still-guest.ts';
import { never } from './raw-server.ts';

const stillOf = (vm: MiniVm, ...sources: readonly RunsSource[]): Promise<StillGuest> =>
  StillGuest.of({ pid: vm.pid, clock: systemClock, sources });

function kindOf(work: () => void): string {
  try {
    work();
    return '';
  } catch (error) {
    return error instanceof Failure ? (error.detail as FailureDetail).kind : String(error);
  }
}

describe.each(runsSources)('counted by %s', (source) => {
  test('a paused VM stands still, however often it is asked and read', async () => {
    await using vm = await launchMiniVm({ dialect: 'e2b', memoryMib: 16 });
    await vm.run({ pages: { firstPage: 1000, pageCount: 100 } });
    await vm.pause();
    const still = await stillOf(vm, source);
    expect(still.counts).toBe(true);
    await still.saved(never);
    for (let i = 0; i < 20; i++) await vm.readBytes(0, 16 * 1024 * 1024);
    await vm.set('dirty');
    await vm.pause();
    expect(kindOf(() => still.verify())).toBe('');
  });

  test('a VM that ran and stands again is noticed', async () => {
    await using vm = await launchMiniVm({ dialect: 'e2b', memoryMib: 16 });
    await vm.pause();
    const still = await stillOf(vm, source);
    await still.saved(never);
    await vm.resume();
    await vm.pause();
    expect(kindOf(() => still.verify())).toBe('vm-ran');
  });

  test('a VM that runs is noticed, at the save and at the end', async () => {
    await using vm = await launchMiniVm({ dialect: 'e2b', memoryMib: 16 });
    await vm.pause();
    const still = await stillOf(vm, source);
    await still.saved(never);
    await vm.resume();
    await vm.program({ pages: { firstPage: 1000, pageCount: 1000 }, loop: true });
    expect(kindOf(() => still.verify())).toBe('vm-ran');
    const other = await stillOf(vm, source);
    const error: unknown = await other.saved(never).catch((reason: unknown) => reason);
    expect(error).toMatchObject({ detail: { kind: 'vm-ran' } });
  });
});

test('a thread that is gone is no proof of anything', async () => {
  const vm = await launchMiniVm({ memoryMib: 16 });
  await using closed = vm;
  await vm.pause();
  const still = await stillOf(closed, 'schedstat');
  await still.saved(never);
  await vm.kill();
  expect(kindOf(() => still.verify())).toBe('read-failed');
});

test('where no vCPU can be told apart, or nothing is counted, it says so', async () => {
  await using vm = await launchMiniVm({ memoryMib: 16 });
  const folder = await mkdtemp(join(tmpdir(), 'varve-threads-'));
  try {
    await mkdir(join(folder, '77'));
    await writeFile(join(folder, '77', 'comm'), 'worker\n');
    const { pid } = vm;
    const unnamed = await StillGuest.of({ pid, clock: systemClock, taskFolder: folder });
    const missing = await StillGuest.of({
      pid,
      clock: systemClock,
      taskFolder: join(folder, 'none'),
    });
    const uncounted = await stillOf(vm);
    for (const still of [unnamed, missing, uncounted]) {
      expect(still.counts).toBe(false);
      await still.saved(never);
      expect(kindOf(() => still.verify())).toBe('');
    }
  } finally {
    await rm(folder, { recursive: true });
  }
});

test('a thread that runs has turns, and this one is not asleep', () => {
  for (const source of runsSources) {
    const runs = threadRuns(process.pid, process.pid, source, { withState: true });
    expect(runs.error).toBe(0);
    expect(runs.turns > 0n).toBe(true);
    expect(runs.asleep).toBe(false);
  }
  expect(threadRuns(process.pid, 1, 'schedstat', { withState: false }).error).not.toBe(0);
});
