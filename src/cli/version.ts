import { readFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';

/** The package's own folder: two above src/, three above dist/src/. */
export const packageFolder: string = (() => {
  const here = dirname(fileURLToPath(import.meta.url));
  return here.includes('/dist/src/') ? join(here, '../../..') : join(here, '../..');
})();

const { version } = JSON.parse(readFileSync(join(packageFolder, 'package.json'), 'utf8')) as {
  version: string;
};

/** Version of this program, from package.json. */
export const VERSION: string = version;
