import { existsSync, mkdtempSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { request } from 'node:http';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { expect, onTestFinished, test } from 'vitest';
import { migrations } from '../../migrations/index.ts';
import type { CaptureView, VmView } from '../../src/capture/types.ts';
import type { Layer, SnapshotPage } from '../../src/catalog/catalog.ts';
import { openCatalog } from '../../src/catalog/open.ts';
import { launchMiniVm } from '../../src/minivm/launch.ts';
import { MIB } from '../../src/units.ts';
import { startDaemon, varve, type Daemon } from './run.ts';

const TIMEOUT_MS = 180_000;

function get(daemon: Daemon, path: string): Promise<{ status: number; text: string }> {
  return new Promise((resolve, reject) => {
    const options = { socketPath: join(daemon.folder, 'api.sock'), path, agent: false };
    request(options, (response) => {
      let text = '';
      response.on('data', (chunk: Buffer) => (text += chunk.toString()));
      response.on('end', () => resolve({ status: response.statusCode ?? 0, text }));
    })
      .on('error', reject)
      .end();
  });
}

test(
  'a VM is attached, captured twice, listed, drawn, restored and retired from the command line',
  async () => {
    await using daemon = await startDaemon();
    const socketPath = join(daemon.vmRoot, 'a.sock');
    await using vm = await launchMiniVm({ id: 'a', socketPath, memoryMib: 32 });
    await vm.run({ pages: { firstPage: 0, pageCount: 1000 } });
    const attached = await daemon.json<VmView>('attach', socketPath, '--id', 'web');
    expect(attached).toMatchObject({ vmId: 'web', state: 'attached', pid: vm.pid });
    const first = await daemon.json<CaptureView>('capture', 'web', '--alias', 'first');
    expect(first).toMatchObject({ status: 'published', vmRunning: true, failure: null });
    await vm.run({ pages: { firstPage: 100, pageCount: 10 }, value: 2 });
    await vm.pause();
    const second = await daemon.json<CaptureView>('capture', 'web', '--resume-after', 'copy');
    expect(second.result?.predecessor).toBe(first.result?.layer);
    // This VMM has no epochs of its own.
    const ahead = await daemon.run('capture', 'web', '--precopy-rounds', '1');
    expect(ahead.code).toBe(2);
    expect(ahead.stderr).toContain('cannot be read while it runs');
    expect((await daemon.run('capture', 'web', '--precopy-rounds', '17')).code).toBe(2);

    const page = await daemon.json<SnapshotPage>('ls', '--vm', 'web');
    const ids = [second.result?.snapshotId, first.result?.snapshotId];
    expect(page.snapshots.map((snapshot) => snapshot.id)).toEqual(ids);
    expect((await daemon.run('ls')).stdout).toMatch(/SNAPSHOT +VM +STATE[^]*first/);
    expect((await daemon.run('show', 'first')).stdout).toContain('vm-state');
    const layers = await daemon.json<readonly (Layer & { epoch: number })[]>('lineage', 'web');
    expect(layers.map(({ uuid, epoch }) => [uuid, epoch])).toEqual([
      [first.result?.layer, 1],
      [second.result?.layer, 2],
    ]);
    expect((await daemon.run('lineage', 'web')).stdout).toMatch(/├─ .*epoch 2 .*\n└─ .*epoch 1 /);

    const output = join(daemon.folder, 'out');
    await daemon.json('restore', second.result?.snapshotId ?? '', '--output', output);
    expect(statSync(join(output, 'memory')).size).toBe(32 * MIB);
    await using restored = await launchMiniVm({
      socketPath: join(daemon.vmRoot, 'b.sock'),
      restore: { memoryPath: join(output, 'memory'), snapshotPath: join(output, 'vm-state') },
    });
    const pages = (32 * MIB) / 4096;
    expect(await restored.hashes(0, pages)).toEqual(await vm.hashes(0, pages));

    expect((await daemon.run('rm', 'first')).code).toBe(0);
    expect((await daemon.run('restore', 'first', '--output', join(output, 'x'))).code).toBe(4);
    const metrics = (await get(daemon, '/metrics')).text;
    expect(metrics).toContain('varve_captures_total{outcome="published",reason="none"} 2');
    expect(metrics).toContain('varve_captures_in_flight 0');
    expect(daemon.log()).toContain(`"capture":"${first.captureId}"`);
    expect(await daemon.stop()).toBe(0);
  },
  TIMEOUT_MS,
);

test(
  'each kind of failure has its exit code and names what is wrong',
  async () => {
    await using daemon = await startDaemon();
    const missing = await daemon.run('show', 'no-such-snapshot');
    expect([missing.code, missing.stderr]).toEqual([
      4,
      expect.stringContaining('snapshot-missing'),
    ]);
    const unknown = await daemon.run('capture', 'nobody');
    expect([unknown.code, unknown.stderr]).toEqual([4, expect.stringContaining('vm-unknown')]);
    const outside = await daemon.run('attach', '/etc/passwd');
    expect([outside.code, outside.stderr]).toEqual([
      6,
      expect.stringContaining('path-outside-roots'),
    ]);
    const notAVmm = await daemon.run('attach', join(daemon.folder, 'vms'));
    expect(notAVmm.code).not.toBe(0);
    const json = await daemon.run('--json', 'show', 'no-such-snapshot');
    expect(JSON.parse(json.stderr)).toMatchObject({ error: { code: 'snapshot-missing' } });
    expect(daemon.log()).not.toContain('"level":"error"');
  },
  TIMEOUT_MS,
);

test(
  'a second daemon on the same folder is refused, and the first goes on',
  async () => {
    await using daemon = await startDaemon();
    const second = await daemon.run('serve');
    expect(second.code).toBe(1);
    expect(second.stderr).toContain('node.db');
    expect((await get(daemon, '/healthz')).status).toBe(200);
  },
  TIMEOUT_MS,
);

test('a catalog of a newer program is refused at start', async () => {
  const folder = mkdtempSync(join(tmpdir(), 'varve-newer-'));
  onTestFinished(() => rmSync(folder, { recursive: true, force: true }));
  const change = { id: '9999-change', breaking: true, up: () => [] };
  const url = `sqlite:${join(folder, 'catalog.db')}`;
  const newer = await openCatalog({ url, migrationList: [...migrations, change] });
  if (!newer.ok) throw new Error(newer.error.message);
  await newer.value.close();
  const configPath = join(folder, 'varve.toml');
  writeFileSync(
    configPath,
    `[server]\nlisten = "off"\nsocket = "${folder}/api.sock"\n[paths]\nstate = "${folder}"\n` +
      `[catalog]\nurl = "${url}"\n[pipeline]\nslab_budget = "32MiB"\n`,
  );
  const refused = await varve(['--config', configPath, 'serve']);
  expect(refused.code).toBe(1);
  expect(refused.stderr).toContain('9999-change');
  expect(existsSync(join(folder, 'api.sock'))).toBe(false);
}, 60_000);

test('usage, configuration and an absent daemon are told apart by exit code', async () => {
  expect((await varve(['frobnicate'])).code).toBe(2);
  expect((await varve(['--help'])).code).toBe(0);
  const unreadable = await varve(['--config', '/nonexistent/varve.toml', 'vms']);
  expect([unreadable.code, unreadable.stderr]).toEqual([2, expect.stringContaining('ENOENT')]);
  const absent = await varve(['--url', 'unix:/nonexistent/api.sock', 'vms']);
  expect([absent.code, absent.stderr]).toEqual([3, expect.stringContaining('varve serve')]);
  expect((await varve(['--url', 'ftp://x', 'vms'])).code).toBe(2);
}, 60_000);
