/** `npm run bench -- <subject> [--size smoke|full]`: runs one bench and prints its lines. */
import { parseArgs } from 'node:util';
import { captureBench, sizes as captureSizes } from './capture.bench.ts';
import { catalogBench, sizes as catalogSizes } from './catalog.bench.ts';
import { layerBench, sizes as layerSizes } from './layer.bench.ts';

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: { size: { type: 'string', default: 'full' } },
});
const size = values.size === 'smoke' ? 'smoke' : 'full';
const print = (line: string): void => void process.stdout.write(`${line}\n`);
const benches: Readonly<Record<string, () => Promise<void>>> = {
  capture: () => captureBench(captureSizes[size], print),
  catalog: () => catalogBench(catalogSizes[size], print),
  layer: () => layerBench(layerSizes[size], print),
};
const [subject = ''] = positionals;
const bench = benches[subject];
if (bench === undefined) {
  print(`which bench? ${Object.keys(benches).join(', ')}`);
  process.exitCode = 2;
} else {
  await bench();
}
