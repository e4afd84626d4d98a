import { spawn } from 'node:child_process';
import { EventEmitter, once } from 'node:events';
import { existsSync, mkdirSync, readFileSync, truncateSync, writeFileSync } from 'node:fs';
import { createServer } from 'node:http';
import { join } from 'node:path';
import { expect, onTestFinished, test } from 'vitest';
import { systemClock } from '../../src/clock.ts';
import { resumedIn, takeReport } from '../../src/lineage/supervisor-report.ts';
import { Supervisor, supervisorPath } from '../../src/lineage/supervisor.ts';
import type { SupervisedVm, SupervisorError } from '../../src/lineage/supervisor.ts';
import { vmId } from '../../src/units.ts';
import { mustFail, mustOk, temporaryFolder } from './fixtures.ts';

const startTimeTicks = BigInt(
  readFileSync('/proc/self/stat', 'utf8')
    .replace(/^.*\) /s, '')
    .split(' ')[19] ?? '',
);

/** A VMM that this very process plays: it listens, so the kernel names us as its peer. */
class Vmm {
  state: 'Running' | 'Paused' = 'Paused';
  /** Monotonic milliseconds of every resume that came. */
  readonly resumes: number[] = [];
  /** Called before an answer. */
  onResume: (count: number) => 'answer' | 'refuse' | 'hang' = () => 'answer';
  readonly vm: SupervisedVm;
  readonly #changed = new Set<() => void>();

  constructor(folder: string, name: string) {
    const socketPath = join(folder, `${name}.sock`);
    this.vm = { vmId: vmId(name), socketPath, pid: process.pid, startTimeTicks };
    const server = createServer((request, response) => {
      if (request.method === 'GET') {
        response.end(JSON.stringify({ id: name, state: this.state, vmm_version: '1' }));
        return;
      }
      request.resume().once('end', () => {
        this.resumes.push(performance.now());
        const how = this.onResume(this.resumes.length);
        if (how === 'answer') this.state = 'Running';
        if (how !== 'hang') response.writeHead(how === 'answer' ? 204 : 400).end();
        for (const changed of this.#changed) changed();
      });
    }).listen(socketPath);
    onTestFinished(() => {
      server.closeAllConnections();
      server.close();
    });
  }

  async resumed(count = 1): Promise<void> {
    while (this.resumes.length < count) {
      await new Promise<void>((resolve) => this.#changed.add(resolve));
    }
  }
}

const script = `
  import { Supervisor, supervisorPath } from '${join(process.cwd(), 'dist/src/lineage/supervisor.js')}';
  import { systemClock } from '${join(process.cwd(), 'dist/src/clock.js')}';
  const { folder, vms, then } = JSON.parse(process.argv[1]);
  const started = await Supervisor.start({ executable: supervisorPath(), clock: systemClock,
    lockPath: folder + '/supervisor.lock', reportPath: folder + '/supervisor.report' });
  if (!started.ok) throw new Error(started.error.message);
  for (const vm of vms) {
    const told = await started.value.paused({ ...vm, startTimeTicks: BigInt(vm.startTimeTicks) });
    if (!told.ok) throw new Error(told.error.message);
  }
  for (const vm of then) await started.value.resumed(vm);
  process.stdout.write(String(started.value.pid) + '\\n');
  setInterval(() => {}, 1000);
`;

/** A daemon in a process of its own that has told its supervisor all this; to be killed. */
async function daemon(folder: string, vms: SupervisedVm[], then: string[] = []) {
  const plain = vms.map((vm) => ({ ...vm, startTimeTicks: vm.startTimeTicks.toString() }));
  const input = JSON.stringify({ folder, vms: plain, then });
  const child = spawn(process.execPath, ['--input-type=module', '-e', script, input], {
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  onTestFinished(() => void child.kill('SIGKILL'));
  const [said] = (await once(child.stdout, 'data')) as [Buffer];
  return { child, supervisorPid: Number(said.toString()) };
}

const report = (folder: string): string[] =>
  readFileSync(join(folder, 'supervisor.report'), 'utf8').trimEnd().split('\n');

const options = (folder: string) => ({
  executable: supervisorPath(),
  clock: systemClock,
  lockPath: join(folder, 'supervisor.lock'),
  reportPath: join(folder, 'supervisor.report'),
});

/** Resolves once the supervisor of a killed daemon has finished: the next one gets its lock. */
async function afterwards(folder: string): Promise<void> {
  const next = mustOk(await Supervisor.start(options(folder)));
  await next.close();
}

test('a daemon killed with SIGKILL has its paused VM resumed within a second, and only that', async () => {
  const folder = temporaryFolder();
  const [ours, back, foreign] = ['ours', 'back', 'foreign'].map((name) => new Vmm(folder, name));
  if (ours === undefined || back === undefined || foreign === undefined) throw new Error('three');
  const { child } = await daemon(folder, [ours.vm, back.vm], [back.vm.vmId]);
  const killed = performance.now();
  child.kill('SIGKILL');
  await ours.resumed();
  const took = (ours.resumes[0] ?? Infinity) - killed;
  console.log(`resumed ${took.toFixed(1)} ms after the kill`);
  expect(took).toBeLessThan(1000);
  await afterwards(folder);
  expect(ours.resumes).toHaveLength(1);
  expect(back.resumes).toEqual([]);
  expect(foreign.resumes).toEqual([]);
  expect(report(folder)).toEqual([expect.stringMatching(/^resumed after \d+ ms: pid \d+ .*ours/)]);
  const path = join(folder, 'supervisor.report');
  expect(mustOk(await takeReport(path))).toEqual([{ pid: process.pid, startTimeTicks }]);
  // What it said of one pause is not said of the next.
  expect(mustOk(await takeReport(path))).toEqual([]);
});

test('signals to the supervisor’s group do not end it before its daemon', async () => {
  const folder = temporaryFolder();
  const vmm = new Vmm(folder, 'vm');
  const { child, supervisorPid } = await daemon(folder, [vmm.vm]);
  for (const signal of ['SIGHUP', 'SIGINT', 'SIGTERM'] as const)
    process.kill(supervisorPid, signal);
  child.kill('SIGKILL');
  await vmm.resumed();
});

test('a pause that was under way when the daemon died is undone too', async () => {
  const folder = temporaryFolder();
  const vmm = new Vmm(folder, 'vm');
  vmm.onResume = (count) => {
    if (count === 1) queueMicrotask(() => (vmm.state = 'Paused'));
    return 'answer';
  };
  const { child } = await daemon(folder, [vmm.vm]);
  child.kill('SIGKILL');
  await vmm.resumed(2);
  await afterwards(folder);
  expect(vmm.state).toBe('Running');
});

test('a VMM that hangs or refuses at first delays no other and is tried again', async () => {
  const folder = temporaryFolder();
  const slow = new Vmm(folder, 'slow');
  slow.onResume = (count) => (count === 1 ? 'hang' : count === 2 ? 'refuse' : 'answer');
  const quick = new Vmm(folder, 'quick');
  const { child } = await daemon(folder, [slow.vm, quick.vm]);
  const killed = performance.now();
  child.kill('SIGKILL');
  await quick.resumed();
  expect(performance.now() - killed).toBeLessThan(1000);
  await slow.resumed(3);
  await afterwards(folder);
  expect(slow.state).toBe('Running');
});

test('a socket that another process listens on now is left alone', async () => {
  const folder = temporaryFolder();
  const other = new Vmm(folder, 'other');
  const reborn = new Vmm(folder, 'reborn');
  const gone = { ...other.vm, vmId: vmId('gone'), socketPath: join(folder, 'gone.sock') };
  const { child } = await daemon(folder, [
    { ...other.vm, pid: process.ppid },
    { ...reborn.vm, startTimeTicks: startTimeTicks + 1n },
    gone,
  ]);
  child.kill('SIGKILL');
  await once(child, 'exit');
  await afterwards(folder);
  expect([...other.resumes, ...reborn.resumes]).toEqual([]);
  expect(report(folder).map((line) => line.split(' ')[0])).toEqual(['gone', 'gone', 'gone']);
});

test('a supervisor that dies is replaced by one that knows what is paused', async () => {
  const folder = temporaryFolder();
  const vmm = new Vmm(folder, 'vm');
  const ends = new EventEmitter();
  const onRestart = (failure: SupervisorError): void => void ends.emit('end', failure.message);
  await using supervisor = mustOk(await Supervisor.start({ ...options(folder), onRestart }));
  mustOk(await supervisor.paused(vmm.vm));
  const end = once(ends, 'end');
  process.kill(supervisor.pid ?? 0, 'SIGKILL');
  const more = { ...vmm.vm, vmId: vmId('more'), socketPath: join(folder, 'gone.sock') };
  mustOk(await supervisor.paused(more));
  mustOk(await supervisor.resumed(vmId('more')));
  expect(await end).toEqual([expect.stringMatching(/SIGKILL/)]);
  mustOk(await supervisor.paused(more));
  await supervisor.close();
  expect(vmm.resumes).toHaveLength(1);
});

test('closing with nothing paused ends the supervisor at once and leaves no process', async () => {
  const folder = temporaryFolder();
  const supervisor = mustOk(await Supervisor.start(options(folder)));
  const pid = supervisor.pid ?? 0;
  expect(existsSync(`/proc/${pid}`)).toBe(true);
  await supervisor.close();
  expect(existsSync(`/proc/${pid}`)).toBe(false);
});

test('a supervisor that cannot be started is an error that says why', async () => {
  const folder = temporaryFolder();
  const missing = { ...options(folder), executable: join(folder, 'none') };
  expect(mustFail(await Supervisor.start(missing)).message).toMatch(/ENOENT/);
  const unlockable = { ...options(folder), lockPath: join(folder, 'no', 'lock') };
  expect(mustFail(await Supervisor.start(unlockable)).message).toMatch(/status 2/);
});

test('a report that is not there, not a file, too long or not ours says nothing', async () => {
  const path = join(temporaryFolder(), 'report');
  expect(mustOk(await takeReport(path))).toEqual([]);
  writeFileSync(path, 'resumed after 1 ms: pid 7 start 8 /a\n');
  truncateSync(path, 5 * 1024 * 1024);
  expect(mustFail(await takeReport(path)).message).toMatch(/5242880 bytes/);
  expect(mustOk(await takeReport(path))).toEqual([]);
  const folder = join(temporaryFolder(), 'folder');
  mkdirSync(folder);
  expect(mustFail(await takeReport(folder)).message).toMatch(/EISDIR/);
  const lines = [
    'gone after 1 ms: pid 1 start 2 /a',
    'failed after 1 ms: pid 1 start 2 /a',
    'resumed after 1 ms: pid 3 /old',
    'resumed after 1 ms: pid -3 start 2 /a',
    'resumed after 1 ms: pid 3 start 99999999999999999999999 /a',
    '\0resumed after 1 ms: pid 3 start 2 /a',
    'resumed after 1 ms: pid 5 start 6 /b c',
    'resumed after 1 ms: pid 7 start 8 /not-whole',
  ];
  expect(resumedIn(lines.join('\n'))).toEqual([{ pid: 5, startTimeTicks: 6n }]);
});
