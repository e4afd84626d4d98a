/** With no descriptor to be had, nothing is known of a VM; that it is gone is known least of all. */
import { spawn, spawnSync } from 'node:child_process';
import { once } from 'node:events';
import { expect, test } from 'vitest';
import { launchMiniVm } from '../../src/minivm/launch.ts';
import { processStartTime } from '../../src/native/guest.ts';
import { readVmas } from '../../src/vmm/address-map.ts';
import { identify } from '../../src/vmm/identity.ts';
import { isAlive, isGone } from '../../src/vmm/process-life.ts';

/** Runs `work` with no descriptor left. Who gives them back is started before. */
async function withoutDescriptors<T>(work: () => Promise<T>): Promise<T> {
  const self = ['--pid', String(process.pid)];
  const limits = spawnSync('prlimit', [
    ...self,
    '--nofile',
    '--output',
    'SOFT,HARD',
    '--noheadings',
  ]);
  const [soft = '', hard = ''] = limits.stdout.toString().trim().split(/\s+/);
  const back = `read line; prlimit ${self.join(' ')} --nofile=${soft}:${hard}; echo back`;
  const keeper = spawn('sh', ['-c', back], { stdio: ['pipe', 'pipe', 'inherit'] });
  await once(keeper, 'spawn');
  expect(spawnSync('prlimit', [...self, `--nofile=8:${hard}`]).status).toBe(0);
  try {
    return await work();
  } finally {
    keeper.stdin.write('now\n');
    await once(keeper.stdout, 'data');
    await once(keeper, 'exit');
  }
}

test('a VM that lives is not taken for gone while no file can be opened', async () => {
  await using vm = await launchMiniVm({ memoryMib: 8 });
  const pinned = identify(vm.socketPath);
  if (!pinned.ok) throw new Error(pinned.error.message);
  using identity = pinned.value;
  const { pid, startTimeTicks } = identity;
  const seen = await withoutDescriptors(async () => ({
    started: processStartTime(pid).error,
    alive: isAlive({ pid, startTimeTicks }),
    check: identity.check(),
    again: identify(vm.socketPath),
    vmas: await readVmas(pid),
  }));
  expect(seen.started).not.toBe(0);
  expect(seen).toMatchObject({
    alive: true,
    check: 'same',
    again: { ok: false, error: { kind: 'vmm-unreachable', code: 'EMFILE' } },
    vmas: { ok: false, error: { kind: 'vmm-unreachable', code: 'EMFILE' } },
  });
  expect(isAlive({ pid, startTimeTicks: startTimeTicks + 1n })).toBe(false);
  await vm.kill();
  expect([isGone(pid), isAlive({ pid, startTimeTicks }), identity.check()]).toEqual([
    true,
    false,
    'exited',
  ]);
});
