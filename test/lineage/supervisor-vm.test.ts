import { spawn, type ChildProcess } from 'node:child_process';
import { once } from 'node:events';
import { existsSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { expect, onTestFinished, test } from 'vitest';
import { launchMiniVm, type MiniVm } from '../../src/minivm/launch.ts';
import { until } from '../capture/harness.ts';
import { temporaryFolder } from './fixtures.ts';

const dist = join(process.cwd(), 'dist/src');

/** A daemon in short: supervisor, node.db, then the pause that it will not live to undo. */
const script = `
  import { Supervisor, supervisorPath } from '${dist}/lineage/supervisor.js';
  import { systemClock } from '${dist}/clock.js';
  import { MiniVmClient } from '${dist}/minivm/client.js';
  const { folder, socketPath, pid, ticks } = JSON.parse(process.argv[1]);
  const started = await Supervisor.start({ executable: supervisorPath(), clock: systemClock,
    lockPath: folder + '/supervisor.lock', reportPath: folder + '/supervisor.report' });
  if (!started.ok) throw new Error(started.error.message);
  const vm = new MiniVmClient(socketPath);
  void started.value.paused({ vmId: 'vm', socketPath, pid, startTimeTicks: BigInt(ticks) });
  await vm.pause();
  process.stdout.write('paused\\n');
  setInterval(() => {}, 1000);
`;

/** The process of a short daemon that has paused `vm` and dies when it is killed. */
async function pausing(vm: MiniVm, folder: string): Promise<ChildProcess> {
  const ticks = readFileSync(`/proc/${vm.pid}/stat`, 'utf8')
    .replace(/^.*\) /s, '')
    .split(' ')[19];
  const input = JSON.stringify({ folder, socketPath: vm.socketPath, pid: vm.pid, ticks });
  const child = spawn(process.execPath, ['--input-type=module', '-e', script, input], {
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  onTestFinished(() => void child.kill('SIGKILL'));
  await once(child.stdout, 'data');
  return child;
}

test('a resume that is carried out and never answered is one', async () => {
  const folder = temporaryFolder();
  await using vm = await launchMiniVm({ memoryMib: 16, backend: 'thread' });
  await vm.fault({ on: 'resume', action: 'hang', when: 'done', times: 0 });
  const child = await pausing(vm, folder);
  child.kill('SIGKILL');
  await once(child, 'exit');
  const report = (): string => {
    const path = join(folder, 'supervisor.report');
    return existsSync(path) ? readFileSync(path, 'utf8') : '';
  };
  await until(() => report().endsWith('\n'));
  expect(report()).toMatch(new RegExp(`^resumed after \\d+ ms: pid ${vm.pid} `));
  expect((await vm.requests()).filter(({ operation }) => operation === 'resume')).toHaveLength(1);
  expect((await vm.info()).state).toBe('Running');
});

for (const backend of ['auto', 'thread'] as const) {
  test(`the guest’s own counter shows no gap of 1.5 s when the daemon dies (${backend})`, async () => {
    const folder = temporaryFolder();
    await using vm = await launchMiniVm({ memoryMib: 16, backend });
    await vm.resetGap();
    const child = await pausing(vm, folder);
    const frozen = await vm.counters();
    child.kill('SIGKILL');
    await once(child, 'exit');
    let counters = await vm.counters();
    while (counters.counter === frozen.counter) counters = await vm.counters();
    console.log(`${vm.backend}: guest gap ${(counters.maxGapNs / 1e6).toFixed(1)} ms`);
    expect(counters.maxGapNs).toBeGreaterThan(0);
    expect(counters.maxGapNs).toBeLessThan(1.5e9);
  });
}
