import { expect, test } from 'vitest';
import { InFlight } from '../../src/pipeline/in-flight.ts';

const never = new AbortController().signal;
const soon = (): Promise<void> => new Promise((resolve) => setImmediate(resolve));

test('drained waits for every item, and not when there is none', async () => {
  const inFlight = new InFlight();
  await inFlight.drained(never);
  inFlight.sent();
  inFlight.sent();
  let over = false;
  const drained = inFlight.drained(never).then(() => (over = true));
  inFlight.arrived();
  await soon();
  expect(over).toBe(false);
  inFlight.arrived();
  await drained;
});

test('a lost item ends the wait, now and later, with the first error', async () => {
  const inFlight = new InFlight();
  inFlight.sent();
  const waiting = inFlight.drained(never);
  inFlight.fail(new Error('first'));
  inFlight.fail(new Error('second'));
  await expect(waiting).rejects.toThrow('first');
  await expect(inFlight.drained(never)).rejects.toThrow('first');
});

test('an aborted signal ends the wait', async () => {
  const inFlight = new InFlight();
  inFlight.sent();
  const abort = new AbortController();
  const waiting = inFlight.drained(abort.signal);
  abort.abort(new Error('cancelled'));
  await expect(waiting).rejects.toThrow('cancelled');
});
