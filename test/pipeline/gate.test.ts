import { expect, test } from 'vitest';
import { Gate } from '../../src/pipeline/gate.ts';

const never = new AbortController().signal;

function makeGate(waitingMax: number): { gate: Gate; depths: number[] } {
  const depths: number[] = [];
  const gauge = (depth: number): void => void depths.push(depth);
  return { gate: new Gate({ name: 'pause', concurrency: 1, waitingMax, gauge }), depths };
}

test('G1: one is inside, the next waits its turn, the one after that is refused as busy', async () => {
  const { gate, depths } = makeGate(1);
  const first = await gate.enter(never);
  const second = gate.enter(never);
  await expect(gate.enter(never)).rejects.toMatchObject({ detail: { kind: 'busy' } });
  first[Symbol.dispose]();
  first[Symbol.dispose]();
  const inside = await second;
  const third = gate.enter(never);
  inside[Symbol.dispose]();
  (await third)[Symbol.dispose]();
  expect(depths).toEqual([1, 0, 1, 0]);
});

test('G2: one that is aborted while it waits leaves the queue, and its place goes to the next', async () => {
  const { gate } = makeGate(2);
  const first = await gate.enter(never);
  const aborted = new AbortController();
  const second = gate.enter(aborted.signal);
  const third = gate.enter(never);
  aborted.abort(new Error('cancelled'));
  await expect(second).rejects.toThrow('cancelled');
  first[Symbol.dispose]();
  (await third)[Symbol.dispose]();
});
