import { expect, test } from 'vitest';
import { launchMiniVm } from '../../src/minivm/launch.ts';
import { fault } from './helpers.ts';

const json = (body: Buffer): unknown => JSON.parse(body.toString()) as unknown;

test('a fresh VM says who it is, and that it is not started', async () => {
  await using vm = await launchMiniVm({ start: false, id: 'vm-7', dialect: 'firecracker' });
  const { status, body } = await vm.send('GET', '/');
  expect(status).toBe(200);
  expect(json(body)).toMatchObject({
    id: 'vm-7',
    state: 'Not started',
    app_name: 'Firecracker',
    minivm: { backend: vm.backend },
  });
  expect(json((await vm.send('GET', '/version')).body)).toEqual({ firecracker_version: '1.13.1' });
  expect(json((await vm.send('GET', '/machine-config')).body)).toEqual({
    vcpu_count: 1,
    mem_size_mib: 128,
    smt: false,
    track_dirty_pages: false,
    huge_pages: 'None',
  });
});

test('an orchestrator’s boot sequence is accepted, and refused once the VM runs', async () => {
  await using vm = await launchMiniVm({ start: false });
  const put = async (url: string, body: unknown): Promise<number> =>
    (await vm.send('PUT', url, body)).status;
  expect(await put('/boot-source', { kernel_image_path: '/k', boot_args: 'quiet' })).toBe(204);
  const drive = { drive_id: 'rootfs', path_on_host: '/r', is_root_device: true };
  expect(await put('/drives/rootfs', drive)).toBe(204);
  const config = { vcpu_count: 2, mem_size_mib: 64, track_dirty_pages: true };
  expect(await put('/machine-config', config)).toBe(204);
  expect((await vm.send('PATCH', '/machine-config', { mem_size_mib: 32 })).status).toBe(204);
  expect(await put('/actions', { action_type: 'InstanceStart' })).toBe(204);
  expect(json((await vm.send('GET', '/vm/config')).body)).toMatchObject({
    'boot-source': { kernel_image_path: '/k' },
    drives: [drive],
    'machine-config': { vcpu_count: 2, mem_size_mib: 32, track_dirty_pages: true },
  });
  const late = 'The requested operation is not supported after starting the microVM.';
  expect(await fault(vm, 'PUT', '/machine-config', config)).toBe(late);
  expect(await fault(vm, 'PUT', '/actions', { action_type: 'InstanceStart' })).toBe(late);
  expect((await vm.info()).imageBytes).toBe(32 * 1024 * 1024);
});

test('pausing and resuming are idempotent, and need a started VM', async () => {
  await using vm = await launchMiniVm({ start: false });
  expect(await fault(vm, 'PATCH', '/vm', { state: 'Paused' })).toMatch('before starting');
  await vm.start();
  for (const state of ['Paused', 'Paused', 'Resumed', 'Resumed']) {
    expect((await vm.send('PATCH', '/vm', { state })).status).toBe(204);
    expect((await vm.info()).state).toBe(state === 'Paused' ? 'Paused' : 'Running');
  }
});

test('a dialect answers its own endpoints and no other dialect’s', async () => {
  const endpoints = ['/vm/dirty-memory-ranges', '/memory/mappings', '/memory', '/memory/dirty'];
  for (const [dialect, own] of [
    ['firecracker', []],
    ['aenv', endpoints.slice(0, 1)],
    ['e2b', endpoints.slice(1)],
    ['all', endpoints],
  ] as const) {
    await using vm = await launchMiniVm({ dialect, memoryMib: 16 });
    await vm.pause();
    for (const endpoint of endpoints) {
      if ((own as readonly string[]).includes(endpoint)) {
        expect((await vm.send('GET', endpoint)).status, `${dialect} ${endpoint}`).toBe(200);
      } else {
        const message = `Invalid request method and/or path: GET ${endpoint.slice(1)}.`;
        expect(await fault(vm, 'GET', endpoint)).toBe(message);
      }
    }
    expect(await fault(vm, 'PUT', '/vm/dirty-epoch', { action: 'begin' })).toMatch(
      'Invalid request',
    );
  }
});

test('bitmaps are refused while the VM runs', async () => {
  await using vm = await launchMiniVm({ dialect: 'e2b', memoryMib: 16 });
  expect(await fault(vm, 'GET', '/memory/dirty')).toMatch('while the microVM is running');
  expect(await fault(vm, 'GET', '/memory')).toMatch('while the microVM is running');
  expect((await vm.send('GET', '/memory/mappings')).status).toBe(200);
});

test('bad requests are refused with what is wrong', async () => {
  await using vm = await launchMiniVm({ start: false });
  expect(
    await fault(vm, 'PUT', '/machine-config', { vcpu_count: 1, mem_size_mib: 1, x: 1 }),
  ).toMatch(/deserializing.*"x"/);
  expect(await fault(vm, 'PUT', '/machine-config', { vcpu_count: 0, mem_size_mib: 16 })).toMatch(
    'vcpu_count',
  );
  expect(await fault(vm, 'PATCH', '/vm', { state: 'Stopped' })).toMatch('state');
  expect(await fault(vm, 'PUT', '/vm', { state: 'Paused' })).toBe(
    'Invalid request method and/or path: PUT vm.',
  );
  expect(await fault(vm, 'PUT', '/actions', new TextEncoder().encode('{'))).toMatch('JSON');
  expect(await fault(vm, 'PUT', '/minivm/program', { pages: { pages: [] } })).toMatch('pages');
  expect(await fault(vm, 'PUT', '/minivm/regions', { regions: [] })).toMatch('regions');
  const region = (guestAddress: string, bytes: number): unknown => ({
    regions: [{ guestAddress, bytes }],
  });
  expect(await fault(vm, 'PUT', '/minivm/regions', region('0', 4097))).toMatch('whole pages');
  expect(await fault(vm, 'PUT', '/minivm/regions', region('0xbffff000', 8192))).toMatch('gap');
  await vm.configure({ memoryMib: 16, track: true });
  await vm.start();
  await expect(vm.program({ pages: { firstPage: 4095, pageCount: 2 } })).rejects.toThrow('outside');
  await expect(vm.program({ pages: { pages: [4096] } })).rejects.toThrow('outside');
  await expect(vm.writeBytes(16 * 1024 * 1024 - 1, new Uint8Array(2))).rejects.toThrow('outside');
});

test('a socket that exists already is not taken over', async () => {
  await using vm = await launchMiniVm({ start: false });
  await expect(launchMiniVm({ socketPath: vm.socketPath })).rejects.toThrow('already exists');
  expect((await vm.info()).state).toBe('Not started');
});

test('the process ends when its parent closes the pipe, and leaves no socket', async () => {
  const vm = await launchMiniVm({ memoryMib: 16 });
  expect(await vm.hangUp()).toEqual({ code: 0, signal: null });
  await expect(vm.info()).rejects.toThrow('ENOENT');
  await vm[Symbol.asyncDispose]();
});
