import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { expect, onTestFinished, test } from 'vitest';
import { launchMiniVm } from '../../src/minivm/launch.ts';
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

for (const backend of ['auto', 'thread'] as const) {
  test(`the guest’s own counter shows no gap of 1.5 s when the daemon dies (${backend})`, async () => {
    const folder = temporaryFolder();
    await using vm = await launchMiniVm({ memoryMib: 16, backend });
    const ticks = readFileSync(`/proc/${vm.pid}/stat`, 'utf8')
      .replace(/^.*\) /s, '')
      .split(' ')[19];
    const input = JSON.stringify({ folder, socketPath: vm.socketPath, pid: vm.pid, ticks });
    const child = spawn(process.execPath, ['--input-type=module', '-e', script, input], {
      stdio: ['ignore', 'pipe', 'inherit'],
    });
    onTestFinished(() => void child.kill('SIGKILL'));
    await vm.resetGap();
    await once(child.stdout, 'data');
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
