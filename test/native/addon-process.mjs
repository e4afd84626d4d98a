/**
 * A process of its own that loads the addon as a scenario says, so that a test can look at how it
 * ends: run by addon.test.ts as `node addon-process.mjs ADDON SCENARIO`. Prints one JSON object.
 */
import { readdirSync } from 'node:fs';
import { createRequire } from 'node:module';
import { Worker, isMainThread, parentPort, workerData } from 'node:worker_threads';
import { fileURLToPath } from 'node:url';

const PAGE = 4096;
const require = createRequire(import.meta.url);
const self = fileURLToPath(import.meta.url);

/** Reads `source` of this process through the kernel, round after round; marks each in `state`. */
function readOwnMemory(addon, { state, source, dest, rounds }) {
  const pages = source.length / PAGE;
  const rows = BigUint64Array.of(addon.viewAddress(source), 0n, BigInt(pages * PAGE));
  const cancel = new Int32Array(new SharedArrayBuffer(4));
  for (let round = 0; round < rounds; round++) {
    Atomics.add(state, 0, 1);
    Atomics.notify(state, 0);
    let from = 0;
    for (let done = false; !done;) {
      const read = addon.readProcess(process.pid, rows, dest, from, cancel, 0, 0, 0, 1 << 23);
      if (read.error !== 0) throw new Error(`errno ${read.error}`);
      ({ done, bytesDone: from } = read);
    }
  }
  const bits = new Uint8Array(8 * Math.ceil(pages / 64));
  addon.zeroPages(dest, bits, 0);
  if (addon.bitmapCount(bits) !== 0) throw new Error('pages are missing');
  return addon.crc32c(dest, 0);
}

if (!isMainThread) {
  const addon = require(workerData.addonPath);
  parentPort.postMessage(readOwnMemory(addon, workerData));
} else {
  const [, , addonPath, scenario] = process.argv;
  const openFds = () => readdirSync('/proc/self/fd').length;
  const state = new Int32Array(new SharedArrayBuffer(4));
  const shared = (pages) => new Uint8Array(new SharedArrayBuffer(pages * PAGE));
  const small = { source: shared(64).fill(7), state, rounds: 1 };
  const large = { source: shared(4096).fill(7), dest: shared(4096), state, rounds: 1e9 };
  const start = (work) => new Worker(self, { workerData: { addonPath, ...work } });
  const startSmall = () => start({ ...small, dest: shared(64) });
  const answer = (worker) =>
    new Promise((resolve, reject) => {
      let message;
      worker.once('message', (value) => (message = value));
      worker.once('error', reject);
      worker.once('exit', () => resolve(message));
    });
  /** Until workers have begun `count` reads in all. */
  const begun = async (count) => {
    for (let seen = Atomics.load(state, 0); seen < count; seen = Atomics.load(state, 0)) {
      await Atomics.waitAsync(state, 0, seen).value;
    }
  };

  const scenarios = {
    /** Main thread and eight workers at once; then workers made anew, a hundred times. */
    async recreate() {
      const expected = readOwnMemory(require(addonPath), { ...small, dest: shared(64) });
      const together = await Promise.all(Array.from({ length: 8 }, () => answer(startSmall())));
      const fdsBefore = openFds();
      const rssBefore = process.memoryUsage.rss();
      const later = [];
      for (let round = 0; round < 100; round++) later.push(await answer(startSmall()));
      return {
        same: [...together, ...later].every((crc) => crc === expected),
        answers: together.length + later.length,
        fds: openFds() - fdsBefore,
        rssMib: Math.round((process.memoryUsage.rss() - rssBefore) / 2 ** 20),
      };
    },
    /** Workers only: the last one to exit unloads the file. */
    async workersOnly() {
      for (let round = 0; round < 10; round++) await answer(startSmall());
      return { same: true };
    },
    /** Terminated in the middle of reading, fifty times. */
    async terminate() {
      require(addonPath);
      await answer(startSmall());
      const fdsBefore = openFds();
      let slowestMs = 0;
      for (let round = 0; round < 50; round++) {
        const count = Atomics.load(state, 0);
        const worker = start(large);
        await begun(count + 2);
        const asked = performance.now();
        await worker.terminate();
        slowestMs = Math.max(slowestMs, performance.now() - asked);
      }
      return { same: true, fds: openFds() - fdsBefore, slowestMs };
    },
    /** The process ends while workers are reading. */
    async exitWhileReading() {
      require(addonPath);
      start(large);
      start(large);
      await begun(4);
      return { same: true };
    },
  };
  const result = await scenarios[scenario]();
  process.stdout.write(JSON.stringify(result), () => process.exit(0));
}
