/** What a new user does first, as the README says it: a VM, a capture, a restore; then claims. */
import { spawn, type ChildProcess } from 'node:child_process';
import { once } from 'node:events';
import { existsSync } from 'node:fs';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { expect, test } from 'vitest';
import { program, startDaemon, varve } from './run.ts';

/** `varve minivm start` in the foreground of a process of its own. */
class Foreground implements AsyncDisposable {
  readonly child: ChildProcess;
  readonly lines: string[] = [];

  constructor(...args: string[]) {
    this.child = spawn(process.execPath, [program, 'minivm', 'start', ...args], {
      stdio: ['ignore', 'pipe', 'inherit'],
    });
  }

  async listening(): Promise<string> {
    if (this.child.stdout === null) throw new Error('it has a pipe');
    const [line] = (await once(createInterface({ input: this.child.stdout }), 'line')) as [string];
    return line;
  }

  async end(signal: NodeJS.Signals): Promise<number | null> {
    const exited = once(this.child, 'exit');
    this.child.kill(signal);
    return ((await exited) as [number | null])[0];
  }

  async [Symbol.asyncDispose](): Promise<void> {
    if (this.child.exitCode === null && this.child.signalCode === null) await this.end('SIGTERM');
  }
}

test('a VM is started, written, captured and restored with the commands alone', async () => {
  await using daemon = await startDaemon();
  const socket = join(daemon.vmRoot, 'a.sock');
  await using first = new Foreground(socket, '--memory', '16MiB');
  expect(await first.listening()).toMatch(/listens on .*a\.sock/);
  const { code, stdout } = await varve(['minivm', 'write', socket, '--pages', '1000:500']);
  expect([code, stdout]).toEqual([0, 'the guest wrote 500 pages, 1000 to 1499\n']);

  await daemon.json('attach', socket, '--id', 'a');
  await daemon.json('capture', 'a', '--alias', 'first');
  const out = join(daemon.folder, 'out');
  await daemon.json('restore', 'first', '--output', out);
  const sums = [];
  for (const args of [[socket], ['--file', join(out, 'memory')]]) {
    sums.push((await daemon.json<{ sha256: string }>('minivm', 'sum', ...args)).sha256);
  }
  expect(sums[1]).toBe(sums[0]);

  const copy = join(daemon.vmRoot, 'b.sock');
  await using second = new Foreground(copy, '--restore', out);
  await second.listening();
  const restored = await daemon.json<{ sha256: string }>('minivm', 'sum', copy);
  expect(restored.sha256).toBe(sums[0]);
  expect(await second.end('SIGINT')).toBe(0);
  expect(existsSync(copy)).toBe(false);
});

test.each([
  [['start', '/nowhere/a.sock'], 1, /a\.sock/],
  [['start', '/tmp/x.sock', '--memory', '1000'], 2, /whole MiB/],
  [['write', '/nowhere/a.sock', '--pages', '1:2'], 1, /a\.sock/],
  [['write', '/nowhere/a.sock', '--pages', '7'], 2, /FIRST:COUNT/],
] as const)('minivm %j ends with %i and says why', async (args, status, why) => {
  const ran = await varve(['minivm', ...args]);
  expect(ran.code).toBe(status);
  expect(ran.stderr).toMatch(why);
  expect(ran.stderr).not.toMatch(/\n {4}at /);
});

test('a snapshot is named, held, and made the backing of a volume with the commands alone', async () => {
  await using daemon = await startDaemon();
  const socket = join(daemon.vmRoot, 'a.sock');
  await using vm = new Foreground(socket, '--memory', '16MiB');
  await vm.listening();
  await daemon.json('minivm', 'write', socket, '--pages', '0:100');
  await daemon.json('attach', socket, '--id', 'a');
  interface Made {
    readonly result: { readonly snapshotId: string };
  }
  const [one, two] = [
    await daemon.json<Made>('capture', 'a'),
    await daemon.json<Made>('capture', 'a'),
  ].map(({ result }) => result.snapshotId);
  if (one === undefined || two === undefined) throw new Error('two captures');
  await daemon.json('alias', 'base', one);

  const held = await daemon.json<{ id: string; purpose: string }>('hold', 'take', 'base');
  expect(held.purpose).toBe('manual');
  expect(await daemon.json('hold', 'ls')).toEqual([held]);
  await daemon.json('hold', 'release', held.id);
  expect(await daemon.json('hold', 'ls')).toEqual([]);
  const closed = await daemon.json<{ id: string }[]>('hold', 'ls', '--closed');
  expect(closed.map(({ id }) => id)).toContain(held.id);

  const created = await daemon.json('volume', 'create', 'root', 'base');
  expect(created).toMatchObject({ id: 'root', version: 1 });
  const switched = await daemon.json('volume', 'switch', 'root', two, '--at', '1');
  expect(switched).toMatchObject({ id: 'root', version: 2 });
  const again = await daemon.run('volume', 'switch', 'root', 'base', '--at', '1');
  expect(again.code).toBe(5);
  expect(await daemon.json('volume', 'show', 'root')).toEqual(switched);
  expect(await daemon.json('volume', 'ls')).toEqual([switched]);
  await daemon.json('volume', 'rm', 'root');
  expect(await daemon.json('volume', 'ls')).toEqual([]);
  for (const command of ['hold ls', 'volume ls', 'ls']) {
    expect((await daemon.run(...command.split(' '))).code).toBe(0);
  }
});
