import { expect, test } from 'vitest';
import { VmmClient } from '../../src/vmm/client.ts';
import { enableTracking, probeVmm } from '../../src/vmm/probe.ts';
import { answerPaths, httpAnswer, never, pausedVm, startRawServer } from './raw-server.ts';

const notPaused = '{"fault_message":"VM must be paused to read dirty pages"}';
const notStarted = '{"fault_message":"The requested operation is not supported before starting."}';

test.each([
  ['firecracker', {}],
  ['aenv', { '/vm/dirty-memory-ranges': [200, '{}'] }],
  ['e2b', { '/memory/mappings': [200, '{}'], '/memory/dirty': [400, notPaused] }],
  ['e2b', { '/memory/mappings': [400, notStarted], '/memory/dirty': [400, notStarted] }],
] as const)('the dialect %s is found by asking', async (dialect, paths) => {
  const all = { ...pausedVm, ...(paths as Record<string, [number, string]>) };
  await using server = await startRawServer(answerPaths(all));
  const probed = await probeVmm(new VmmClient({ socketPath: server.socketPath }), never);
  expect(probed).toMatchObject({
    ok: true,
    value: {
      dialect,
      version: '1.13.0',
      id: 'vm1',
      state: 'Paused',
      machineConfig: { mem_size_mib: 128, track_dirty_pages: true },
      capabilities: {
        stateOnlySnapshot: dialect !== 'firecracker',
        clearsOnRead: dialect === 'firecracker',
        removesPages: true,
      },
    },
  });
  expect(server.requests.every((line) => line.startsWith('GET '))).toBe(true);
});

test('a long dirty set does not make the probe slow or wrong', async () => {
  const long = `{"ranges":[${'{"a":1},'.repeat(500_000)}{}]}`;
  await using server = await startRawServer(
    answerPaths({ ...pausedVm, '/vm/dirty-memory-ranges': [200, long] }),
  );
  const probed = await probeVmm(new VmmClient({ socketPath: server.socketPath }), never);
  expect(probed).toMatchObject({ ok: true, value: { dialect: 'aenv' } });
});

test('tracking is turned on before boot', async () => {
  const info = pausedVm['/'][1].replace('Paused', 'Not started');
  const config = pausedVm['/machine-config'][1].replace('true', 'false');
  await using server = await startRawServer(
    answerPaths({
      '/': [200, info],
      'GET /machine-config': [200, config],
      'PATCH /machine-config': [204, ''],
    }),
  );
  const on = await enableTracking(new VmmClient({ socketPath: server.socketPath }), never);
  expect(on.ok).toBe(true);
  expect(server.requests.at(-1)).toBe('PATCH /machine-config');
  expect(server.bodies.at(-1)).toBe('{"track_dirty_pages":true}');
});

test('a VM that booted without tracking is refused with the way out', async () => {
  const config = pausedVm['/machine-config'][1].replace('true', 'false');
  await using server = await startRawServer(
    answerPaths({ ...pausedVm, '/machine-config': [200, config] }),
  );
  const on = await enableTracking(new VmmClient({ socketPath: server.socketPath }), never);
  expect(on).toMatchObject({ ok: false, error: { kind: 'tracking-off' } });
  if (!on.ok) expect(on.error.message).toContain('track_dirty_pages');
});

test('a refusal carries its status and the VMM’s words', async () => {
  await using server = await startRawServer(
    answerPaths({ '/vm': [400, '{"fault_message":"Cannot pause: not running"}'] }),
  );
  const paused = await new VmmClient({ socketPath: server.socketPath }).pause(never);
  expect(paused).toMatchObject({
    ok: false,
    error: { kind: 'vmm-refused', status: 400, fault: 'Cannot pause: not running' },
  });
});

test('a state-only snapshot names no memory file', async () => {
  await using server = await startRawServer(answerPaths({ '/snapshot/create': [204, ''] }));
  const client = new VmmClient({ socketPath: server.socketPath });
  await client.createSnapshot({ type: 'Diff', snapshotPath: '/s' }, never);
  expect(server.bodies[0]).toBe('{"snapshot_type":"Diff","snapshot_path":"/s"}');
});

test('loading with tracking falls back to the older name of the field', async () => {
  const fault = '{"fault_message":"unknown field `track_dirty_pages`, expected one of …"}';
  let calls = 0;
  await using server = await startRawServer((socket, line, body) => {
    calls += 1;
    const answer = answerPaths({ '/snapshot/load': calls === 1 ? [400, fault] : [204, ''] });
    answer(socket, line, body);
  });
  const loaded = await new VmmClient({ socketPath: server.socketPath }).loadSnapshot(
    {
      snapshotPath: '/s',
      memory: { backend: 'File', path: '/m' },
      trackDirtyPages: true,
      resume: false,
    },
    never,
  );
  expect(loaded.ok).toBe(true);
  expect(server.bodies[0]).toContain('"track_dirty_pages":true');
  expect(server.bodies[1]).toContain('"enable_diff_snapshots":true');
});

test('a VMM that knows balloons and has none removes no pages', async () => {
  const none = '{"fault_message":"Device not found."}';
  await using server = await startRawServer(answerPaths({ ...pausedVm, '/balloon': [400, none] }));
  const probed = await probeVmm(new VmmClient({ socketPath: server.socketPath }), never);
  expect(probed).toMatchObject({ ok: true, value: { capabilities: { removesPages: false } } });
});

test('a kept connection carries one request after another, and no other survives it', async () => {
  const connections = new Set<unknown>();
  const answers = answerPaths(pausedVm);
  await using server = await startRawServer((socket, line, body) => {
    connections.add(socket);
    answers(socket, line, body);
  });
  const client = new VmmClient({ socketPath: server.socketPath });
  const kept = client.keepConnections();
  for (let i = 0; i < 5; i++)
    expect(await client.state(never)).toEqual({ ok: true, value: 'Paused' });
  expect(connections.size).toBe(1);
  kept[Symbol.dispose]();
  await client.state(never);
  await client.state(never);
  expect(connections.size).toBe(3);
});

test('a kept connection that its peer closed is replaced for GET and PATCH, never for PUT', async () => {
  const accepted: string[] = [];
  await using server = await startRawServer((socket, line) => {
    const first = accepted.length === 0;
    accepted.push(line);
    if (first) socket.write(httpAnswer(200, pausedVm['/'][1]));
    // The second request on the first connection is lost with it.
    else if (accepted.length === 2) socket.destroy();
    else socket.end(httpAnswer(200, pausedVm['/'][1]));
  });
  const client = new VmmClient({ socketPath: server.socketPath });
  const again = async (ask: () => Promise<{ readonly ok: boolean }>): Promise<boolean> => {
    accepted.length = 0;
    using kept = client.keepConnections();
    void kept;
    await client.state(never);
    return (await ask()).ok;
  };
  expect(await again(() => client.state(never))).toBe(true);
  expect(accepted).toHaveLength(3);
  expect(await again(() => client.resume(never))).toBe(true);
  expect(accepted).toHaveLength(3);
  const create = { type: 'Diff', snapshotPath: '/tmp/state' } as const;
  expect(await again(() => client.createSnapshot(create, never))).toBe(false);
  expect(accepted).toHaveLength(2);
});
