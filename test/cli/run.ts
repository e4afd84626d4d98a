/** Runs the built program as a user does. */
import { spawn, type ChildProcess } from 'node:child_process';
import { once } from 'node:events';
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';

export const program = join(import.meta.dirname, '../../bin/varve');

export interface Ran {
  readonly code: number | null;
  readonly stdout: string;
  readonly stderr: string;
}

export async function varve(
  args: readonly string[],
  env: Readonly<Record<string, string>> = {},
): Promise<Ran> {
  const child = spawn(process.execPath, [program, ...args], {
    env: { ...process.env, VARVE_CONFIG: '', VARVE_URL: '', ...env },
    stdio: ['ignore', 'pipe', 'pipe'],
  });
  let stdout = '';
  let stderr = '';
  child.stdout.on('data', (chunk: Buffer) => (stdout += chunk.toString()));
  child.stderr.on('data', (chunk: Buffer) => (stderr += chunk.toString()));
  const [code] = (await once(child, 'close')) as [number | null];
  return { code, stdout, stderr };
}

export interface Daemon extends AsyncDisposable {
  readonly folder: string;
  /** Folder that VMs' sockets may be in. */
  readonly vmRoot: string;
  readonly configPath: string;
  readonly log: () => string;
  readonly child: ChildProcess;
  /** Runs a command against this daemon. */
  run(...args: string[]): Promise<Ran>;
  /** The same with `--json`, parsed; throws where the command failed. */
  json<T>(...args: string[]): Promise<T>;
  stop(signal?: NodeJS.Signals): Promise<number | null>;
}

/** `varve serve` in a process of its own, in a fresh folder. */
export async function startDaemon(extra = ''): Promise<Daemon> {
  const folder = mkdtempSync(join(tmpdir(), 'varve-cli-'));
  const vmRoot = join(folder, 'vms');
  mkdirSync(vmRoot);
  const configPath = join(folder, 'varve.toml');
  writeFileSync(
    configPath,
    [
      `[server]\nlisten = "off"\nsocket = "${folder}/api.sock"`,
      `[paths]\nstate = "${folder}/state"\nsocket_roots = ["${vmRoot}"]`,
      `[node]\nid = "test"`,
      '[pipeline]\nslab_budget = "32MiB"',
      extra,
    ].join('\n'),
  );
  const child = spawn(process.execPath, [program, '--config', configPath, 'serve'], {
    stdio: ['ignore', 'pipe', 'pipe'],
  });
  let log = '';
  const exited = once(child, 'close').then(([code]) => code as number | null);
  const serving = new Promise<void>((resolve) => {
    for (const stream of [child.stdout, child.stderr]) {
      stream.on('data', (chunk: Buffer) => {
        log += chunk.toString();
        if (log.includes('"msg":"serving"')) resolve();
      });
    }
  });
  const early = exited.then((code) => {
    throw new Error(`the daemon ended with ${code}: ${log}`);
  });
  early.catch(() => undefined);
  await Promise.race([serving, early]);
  const run = (...args: string[]) => varve(['--config', configPath, ...args]);
  const stop = (signal: NodeJS.Signals = 'SIGTERM') => {
    child.kill(signal);
    return exited;
  };
  return {
    folder,
    vmRoot,
    configPath,
    log: () => log,
    child,
    run,
    stop,
    async json<T>(...args: string[]) {
      const ran = await run('--json', ...args);
      if (ran.code !== 0)
        throw new Error(`${args.join(' ')} ended with ${ran.code}: ${ran.stderr}`);
      return JSON.parse(ran.stdout) as T;
    },
    async [Symbol.asyncDispose]() {
      if (child.exitCode === null && child.signalCode === null) await stop('SIGKILL');
      rmSync(folder, { recursive: true, force: true });
    },
  };
}
