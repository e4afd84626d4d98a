/**
 * Gets the native addon for this machine: run by `npm install`, and by `npm run native:build`.
 *
 * With a host for prebuilt files (`npm_config_varve_binary_host_mirror`, node-pre-gyp's own setting)
 * node-pre-gyp fetches from there and builds from source where it cannot. Without one it builds from
 * source at once. It is not asked to try first: no public host serves prebuilt files, `binary.host`
 * in package.json is a name that never resolves, and on a machine without a network each try would
 * hold the installation up for a DNS time-out before ending in the same build.
 *
 * The build is incremental: run twice, the second finds nothing to compile.
 */
import { spawnSync } from 'node:child_process';
import { existsSync } from 'node:fs';
import { createRequire } from 'node:module';
import { availableParallelism } from 'node:os';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';

const root = dirname(dirname(fileURLToPath(import.meta.url)));
const require = createRequire(import.meta.url);
const nodePreGyp = join(
  dirname(require.resolve('@mapbox/node-pre-gyp/package.json')),
  'bin',
  'node-pre-gyp',
);

const env = { ...process.env };
env.npm_config_jobs ??= String(availableParallelism());
// Node's own headers, where they are installed beside it: node-gyp would download them.
const prefix = dirname(dirname(process.execPath));
if (env.npm_config_nodedir === undefined && existsSync(join(prefix, 'include/node/node_api.h'))) {
  env.npm_config_nodedir = prefix;
}

const buildOnly = process.argv.includes('--build-only');
const hasHost = Boolean(env.npm_config_varve_binary_host_mirror);
const commands =
  hasHost && !buildOnly
    ? [['install', '--fallback-to-build']]
    : [
        ['configure', '--loglevel=error'],
        ['build', '--loglevel=error'],
      ];

for (const command of commands) {
  const { status, error } = spawnSync(process.execPath, [nodePreGyp, ...command], {
    cwd: root,
    env,
    stdio: 'inherit',
  });
  if (error !== undefined) throw error;
  if (status !== 0) {
    console.error(
      'varve: the native addon was not built. It needs g++ 12 or newer, make, python3, and the ' +
        'headers of liblz4 and libzstd (Debian: build-essential python3 liblz4-dev libzstd-dev).',
    );
    process.exit(status ?? 1);
  }
}
