/** `varve restore` as a process that is asked to end. */
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { existsSync, watch } from 'node:fs';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { launchMiniVm } from '../../src/minivm/launch.ts';
import { program, startDaemon } from './run.ts';

test.each([
  ['SIGINT', 130],
  ['SIGTERM', 143],
  ['SIGHUP', 129],
] as const)('restore ended by %s exits with %i and leaves nothing', async (name, status) => {
  await using daemon = await startDaemon();
  const socketPath = join(daemon.vmRoot, 'vm.sock');
  await using vm = await launchMiniVm({ socketPath, memoryMib: 192, dialect: 'aenv' });
  await vm.deviceWrites({ pages: { firstPage: 1000, pageCount: 47_000 }, value: 3 });
  await daemon.json('attach', socketPath, '--id', 'vm');
  await daemon.json('capture', 'vm', '--alias', 'large');
  const out = join(daemon.folder, 'out');
  const made = new Promise<void>((resolve) => {
    const watcher = watch(daemon.folder, (_event, file) => {
      if (file !== 'out') return;
      watcher.close();
      resolve();
    });
  });
  const args = ['--config', daemon.configPath, 'restore', 'large', '--output', out];
  const child = spawn(process.execPath, [program, ...args], { stdio: 'ignore' });
  const exited = once(child, 'exit') as Promise<[number | null]>;
  await made;
  child.kill(name);
  expect((await exited)[0]).toBe(status);
  expect(existsSync(out)).toBe(false);
  expect(await daemon.json('hold', 'ls')).toEqual([]);
});
