// A worker thread that uses a stack of the main thread's, as the compact stage does.
import { parentPort, workerData } from 'node:worker_threads';
import { compressBatch, compressBound } from '../../dist/src/layer/compress.js';
import { compareWithStack, readStackNow } from '../../dist/src/layer/shared-stack.js';

const { shared, image } = workerData;
const rows = BigUint64Array.from([0n, BigInt(image.length), 0n]);
const equal = compareWithStack({ stack: shared, slab: image, rows });
if (!equal.ok) throw new Error(equal.error.message);
let equalPages = 0;
for (const byte of equal.value) for (let b = byte; b !== 0; b &= b - 1) equalPages += 1;
const into = new Uint8Array(image.length);
const read = readStackNow(shared, 0, into);
const same = read.ok && Buffer.compare(into, image) === 0;
const out = new Uint8Array(compressBound('zstd', 4096, image.length));
const made = compressBatch({ slab: image, rows, out, algorithm: 'zstd', blockBytes: 4096 });
parentPort.once('message', () => {
  const again = readStackNow(shared, 0, into);
  parentPort.postMessage(again.ok ? 'read' : again.error.kind);
});
parentPort.postMessage({ equalPages, same, blocks: made?.lengths.length });
