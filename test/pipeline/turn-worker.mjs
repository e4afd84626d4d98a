// Operations for pool.test.ts. They meet the test on shared memory, never on time.
import { workerData } from 'piscina';

const words = new Int32Array(workerData.cancelWords);

export function order(task) {
  return { name: task.name, place: Atomics.add(words, 0, 1) };
}

export function untilCancelled(task) {
  Atomics.store(words, task.startedSlot, 1);
  Atomics.notify(words, task.startedSlot);
  Atomics.wait(words, task.cancelSlot, 0);
  return 'stopped';
}

export function broken() {
  throw new Error('a bug in an operation');
}
