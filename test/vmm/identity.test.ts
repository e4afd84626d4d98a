import { readdirSync, rmSync } from 'node:fs';
import { expect, test } from 'vitest';
import { launchMiniVm } from '../../src/minivm/launch.ts';
import { VmmClient } from '../../src/vmm/client.ts';
import { watchCount } from '../../src/vmm/exit-watch.ts';
import { identify, identityError } from '../../src/vmm/identity.ts';
import { attach, errorOf, must } from './harness.ts';
import { never, startRawServer } from './raw-server.ts';

const openFds = (): number => readdirSync('/proc/self/fd').length;

test('a VM that is killed is noticed within 100 ms, and its requests say so', async () => {
  await using attached = await attach({ dialect: 'aenv', memoryMib: 16 });
  const { vm, identity, client } = attached;
  expect(identity.pid).toBe(vm.pid);
  expect(identity.check()).toBe('same');
  let noticedAt = 0;
  const noticed = identity.onExit(never).then(() => (noticedAt = performance.now()));
  await vm.kill();
  const gone = performance.now();
  await noticed;
  expect(noticedAt - gone).toBeLessThan(250);
  expect(identity.check()).toBe('exited');
  expect(watchCount()).toBe(0);
  const paused = errorOf(await client.pause(never));
  expect(paused.kind).toBe('vm-exited');
  const info = errorOf(await client.info(never));
  expect(info).toMatchObject({ kind: 'vm-exited', socketPath: vm.socketPath });
});

test('a VM that dies under a request fails it as vm-exited within a second', async () => {
  await using attached = await attach({ dialect: 'aenv', memoryMib: 16 });
  const { vm, client } = attached;
  await vm.fault({ on: 'pause', action: 'die' });
  const started = performance.now();
  const error = errorOf(await client.pause(never));
  expect(error.kind).toBe('vm-exited');
  expect(performance.now() - started).toBeLessThan(1_000);
});

test('a VM that hangs times out and is not taken for dead', async () => {
  await using attached = await attach({ dialect: 'aenv', memoryMib: 16 });
  const { vm, identity } = attached;
  await vm.fault({ on: 'pause', action: 'hang' });
  const client = new VmmClient({ socketPath: vm.socketPath, timeoutsMs: { changeMs: 200 } });
  client.bind(identity);
  expect(errorOf(await client.pause(never)).kind).toBe('vmm-timeout');
  expect(identity.check()).toBe('same');
});

test('another VM at the same socket is a replacement, and gets no request', async () => {
  await using attached = await attach({ dialect: 'aenv', memoryMib: 16 });
  const { vm, identity, client } = attached;
  await vm.kill();
  rmSync(vm.socketPath, { force: true });
  await using other = await launchMiniVm({
    dialect: 'aenv',
    memoryMib: 16,
    socketPath: vm.socketPath,
  });
  await other.clearRequests();
  expect(identity.check()).toBe('replaced');
  expect(errorOf(await client.resume(never)).kind).toBe('vm-replaced');
  expect(await other.requests()).toEqual([]);
  expect(identityError(identity, 'replaced').kind).toBe('vm-replaced');
});

test('a wait for the exit ends with its signal or its identity, without a trace', async () => {
  await using server = await startRawServer(() => undefined);
  const fds = openFds();
  for (let round = 0; round < 20; round += 1) {
    const identity = must(identify(server.socketPath));
    expect(identity.pid).toBe(process.pid);
    const abort = new AbortController();
    const aborted = identity.onExit(abort.signal);
    const disposed = identity.onExit(never);
    expect(watchCount()).toBe(2);
    abort.abort(new Error('enough'));
    await expect(aborted).rejects.toThrow('enough');
    identity[Symbol.dispose]();
    identity[Symbol.dispose]();
    await expect(disposed).rejects.toThrow('detached');
    expect(watchCount()).toBe(0);
    expect(() => identity.check()).toThrow('disposed');
  }
  expect(openFds()).toBeLessThanOrEqual(fds + 2);
});

test('what is no socket, or not there, cannot be identified', () => {
  expect(errorOf(identify('/etc/hostname')).kind).toBe('vmm-not-a-vmm');
  expect(errorOf(identify('/nowhere/api.sock')).kind).toBe('vmm-unreachable');
  expect(errorOf(identify(`/tmp/${'x'.repeat(300)}`)).kind).toBe('vmm-unreachable');
});
