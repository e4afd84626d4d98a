/**
 * `npm run bench -- <subject> [--size smoke|full]`: runs one bench and prints its lines. Subject
 * `capture` also takes `--part full|scattered|growth|memory|health`; `epochs` takes `--part
 * chain|modes|compression|tracking|precopy` and `--plot <file.svg>`; `catalog` takes `--dialect
 * sqlite|postgres`, and `--wait`: once it is loaded it waits for a line on standard input, so that
 * the machine can be made quiet first; `vmm` takes `--firecracker PATH`, and `--tmpfs FOLDER` (default
 * /dev/shm).
 */
import { once } from 'node:events';
import { parseArgs } from 'node:util';
import { captureBench, captureParts, sizes as captureSizes } from './capture.bench.ts';
import { catalogBench, sizes as catalogSizes } from './catalog.bench.ts';
import { epochsBench, parts, sizes as epochSizes } from './epochs.bench.ts';
import { layerBench, sizes as layerSizes } from './layer.bench.ts';
import { vmmBench, sizes as vmmSizes } from './vmm.bench.ts';

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    size: { type: 'string', default: 'full' },
    part: { type: 'string' },
    plot: { type: 'string' },
    dialect: { type: 'string' },
    wait: { type: 'boolean', default: false },
    firecracker: { type: 'string', default: process.env['VARVE_FIRECRACKER'] ?? 'firecracker' },
    tmpfs: { type: 'string', default: '/dev/shm' },
  },
});
const size = values.size === 'smoke' ? 'smoke' : 'full';
const part = parts.find((name) => name === values.part);
const capturePart = captureParts.find((name) => name === values.part);
const print = (line: string): void => void process.stdout.write(`${line}\n`);
const dialects = (): readonly ('sqlite' | 'postgres')[] | undefined =>
  values.dialect === 'sqlite' || values.dialect === 'postgres' ? [values.dialect] : undefined;

async function loaded(): Promise<void> {
  if (!values.wait) return;
  print('loaded');
  await once(process.stdin, 'data');
  process.stdin.pause();
}

const benches: Readonly<Record<string, () => Promise<void>>> = {
  capture: () => captureBench(captureSizes[size], print, capturePart),
  epochs: () => epochsBench(epochSizes[size], print, { part, plotFile: values.plot }),
  catalog: () => catalogBench(catalogSizes[size], print, { dialects: dialects(), loaded }),
  layer: () => layerBench(layerSizes[size], print),
  vmm: () =>
    vmmBench(vmmSizes[size], print, { binary: values.firecracker, memoryFolder: values.tmpfs }),
};
const [subject = ''] = positionals;
const bench = benches[subject];
if (bench === undefined) {
  print(`which bench? ${Object.keys(benches).join(', ')}`);
  process.exitCode = 2;
} else {
  await bench();
}
