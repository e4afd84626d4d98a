/** Folders, sockets and the catalog: what the daemon writes to, tried for real. */
import {
  closeSync,
  constants,
  existsSync,
  fsyncSync,
  linkSync,
  mkdtempSync,
  openSync,
  rmSync,
  statfsSync,
  writeSync,
} from 'node:fs';
import { dirname, join } from 'node:path';
import { openDatabase } from '../catalog/open.ts';
import { migrationStatus } from '../catalog/migrator.ts';
import type { Config } from '../config/load.ts';
import { isLoopback, parseAddress } from '../api/server.ts';
import { Failure, systemCode } from '../result.ts';
import { migrations } from '../../migrations/index.ts';
import { fail, fine, warn, type Finding } from './finding.ts';
import { catalogOptions } from './parts.ts';
import { sizeText } from './table.ts';

/** The nearest folder above a path that exists. */
function existingFolder(path: string): string {
  return existsSync(path) ? path : existingFolder(dirname(path));
}

const why = (error: unknown): string => systemCode(error) ?? String(error);

/** Writes, syncs and links a file as the daemon does, then takes it all away. */
function tryWriting(folder: string): string | undefined {
  const scratch = mkdtempSync(join(folder, '.varve-doctor-'));
  try {
    const file = join(scratch, 'a');
    const fd = openSync(file, 'wx', 0o600);
    writeSync(fd, Buffer.alloc(4096, 1));
    fsyncSync(fd);
    closeSync(fd);
    linkSync(file, join(scratch, 'b'));
    if (!refusesToReplace(file, join(scratch, 'b'))) return 'a hard link replaced a file';
    const folderFd = openSync(scratch, constants.O_DIRECTORY);
    fsyncSync(folderFd);
    closeSync(folderFd);
    return undefined;
  } finally {
    rmSync(scratch, { recursive: true });
  }
}

function refusesToReplace(from: string, to: string): boolean {
  try {
    linkSync(from, to);
    return false;
  } catch (error) {
    return why(error) === 'EEXIST';
  }
}

const SPACE_WARN_BYTES = 10 * 1024 ** 3;
const SPACE_FAIL_BYTES = 256 * 1024 ** 2;

function checkFolder(key: string, path: string): Finding {
  const check = `folder ${key}`;
  const folder = existingFolder(path);
  const where = folder === path ? path : `${path} (to be made under ${folder})`;
  try {
    const problem = tryWriting(folder);
    if (problem !== undefined)
      return fail(check, `${where}: ${problem}`, 'Use another filesystem.');
  } catch (error) {
    const advice = `Make paths.${key} a folder on a local filesystem that this user may write to.`;
    return fail(check, `${where}: ${why(error)}`, advice);
  }
  const facts = statfsSync(folder);
  const free = facts.bavail * facts.bsize;
  const found = `${where}: writes, fsync and links work; ${sizeText(free)} free`;
  if (free < SPACE_FAIL_BYTES) return fail(check, found, 'Free space: a capture would fail.');
  if (free < SPACE_WARN_BYTES)
    return warn(check, found, 'A full capture can take the size of the guest.');
  return fine(check, found);
}

export function checkFolders(config: Config): readonly Finding[] {
  const { state, layers, artifacts, staging } = config.paths;
  const folders = { state, layers, artifacts, staging };
  return Object.entries(folders).map(([key, path]) => checkFolder(key, path));
}

export function checkSocketRoots(config: Config): Finding {
  const missing = config.paths.socketRoots.filter((root) => !existsSync(root));
  const roots = config.paths.socketRoots.join(', ');
  if (missing.length < config.paths.socketRoots.length) return fine('socket-roots', roots);
  const advice = 'Set paths.socket_roots to where the API sockets of your VMMs are.';
  return warn('socket-roots', `none of them exists: ${roots}`, advice);
}

export function checkListen(config: Config): Finding {
  const { listen, socket } = config.server;
  const found = `socket ${socket}, TCP ${listen}`;
  const isLocal = listen === 'off' || isLoopback(parseAddress(listen).host);
  if (isLocal || config.auth.tokens.length > 0) return fine('listen', found);
  return fail('listen', found, 'Set [[auth.tokens]], or listen on a loopback address.');
}

export async function checkCatalog(config: Config): Promise<Finding> {
  const { url } = config.catalog;
  if (url.startsWith('sqlite:') && !existsSync(url.slice('sqlite:'.length))) {
    return fine('catalog', `${url} is not there yet; the daemon or "varve migrate" makes it`);
  }
  try {
    const database = await openDatabase(catalogOptions(config));
    try {
      const { pending } = await migrationStatus(database, migrations);
      if (pending.length === 0) return fine('catalog', `${url}: reachable and up to date`);
      const found = `${url}: lacks ${pending.join(', ')}`;
      return warn('catalog', found, 'Run "varve migrate", or let the daemon apply them.');
    } finally {
      await database.close();
    }
  } catch (error) {
    const text = error instanceof Failure ? error.message : String(error);
    return fail('catalog', `${url}: ${text}`, 'Check catalog.url, and that the database runs.');
  }
}
