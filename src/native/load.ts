import { existsSync } from 'node:fs';
import { createRequire } from 'node:module';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';

/** What this code was written against: native/core/units.hpp has the same numbers. */
const expectedAbi = { version: 1, rowBytes: 24, regionBytes: 24 } as const;

/** A prebuilt file beside the sources, as a package may carry it; else what node-gyp built. */
const candidates = (name: string): readonly string[] => [
  join('prebuilds', `${process.platform}-${process.arch}-glibc`, `${name}.node`),
  join('build', 'Release', `${name}.node`),
];

/** The package's own folder: the nearest one above this file that holds a binding.gyp. */
function packageRoot(): string {
  let folder = dirname(fileURLToPath(import.meta.url));
  while (!existsSync(join(folder, 'binding.gyp'))) {
    const parent = dirname(folder);
    if (parent === folder) throw new Error(`no binding.gyp above ${import.meta.url}`);
    folder = parent;
  }
  return folder;
}

/**
 * Loads one of this package's native files, once per thread. A file that is there and does not load
 * throws its own error; only a file that is not there makes way for the next candidate.
 */
export function loadNativeFile(name: string): unknown {
  const root = packageRoot();
  for (const candidate of candidates(name)) {
    const path = join(root, candidate);
    if (existsSync(path)) return createRequire(import.meta.url)(path) as unknown;
  }
  const tried = candidates(name).join(' or ');
  throw new Error(
    `the native addon is not built: no ${tried} in ${root}; run: npm run native:build`,
  );
}

function checkAbi(addon: unknown): void {
  const abi = (addon as { abi?: Partial<Record<keyof typeof expectedAbi, number>> }).abi ?? {};
  for (const key of ['version', 'rowBytes', 'regionBytes'] as const) {
    if (abi[key] !== expectedAbi[key]) {
      const found = `its ${key} is ${String(abi[key])}, this code needs ${expectedAbi[key]}`;
      throw new Error(
        `the native addon is from another build: ${found}; run: npm run native:build`,
      );
    }
  }
}

let loaded: unknown;

/** The addon `varve`, checked against this code. Each face casts it to the functions it names. */
export function loadAddon(): unknown {
  if (loaded === undefined) {
    const addon = loadNativeFile('varve');
    checkAbi(addon);
    loaded = addon;
  }
  return loaded;
}
