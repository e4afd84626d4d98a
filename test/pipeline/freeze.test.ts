import { expect, test } from 'vitest';
import type { Clock } from '../../src/clock.ts';
import { Freeze, type FreezeActions } from '../../src/pipeline/freeze.ts';

/** A clock whose sleeps end at once and whose time moves by what was slept. */
function testClock(): Clock & { slept: number[] } {
  const slept: number[] = [];
  let ns = 0n;
  return {
    slept,
    nowMs: () => Number(ns) / 1e6,
    monotonicNs: () => (ns += 1_000_000n),
    sleep: (ms) => {
      slept.push(ms);
      ns += BigInt(ms) * 1_000_000n;
      return Promise.resolve();
    },
  };
}

function actions(overrides: Partial<FreezeActions> = {}): FreezeActions & { log: string[] } {
  const log: string[] = [];
  const logged = (what: string) => (): Promise<void> => {
    log.push(what);
    return Promise.resolve();
  };
  return {
    log,
    intend: () => log.push('intend'),
    pause: logged('pause'),
    wasAnswered: () => false,
    isPaused: () => Promise.resolve(false),
    resume: logged('resume'),
    surelyGone: () => false,
    done: () => log.push('done'),
    ...overrides,
  };
}

test('F1: however often the end is asked for, one resume is sent', async () => {
  const a = actions();
  const freeze = new Freeze(a, testClock());
  await freeze.begin();
  await Promise.all([freeze.end(), freeze.end()]);
  await freeze.end();
  expect(a.log).toEqual(['intend', 'pause', 'resume', 'done']);
  expect(freeze.state).toBe('resumed');
});

test('F1: what fails after the resume sends no second one, and is no failure of the first', async () => {
  const a = actions({
    done: () => {
      throw new Error('no space');
    },
  });
  const freeze = new Freeze(a, testClock());
  await freeze.begin();
  await freeze.end();
  expect(a.log).toEqual(['intend', 'pause', 'resume']);
  expect(freeze).toMatchObject({ state: 'resumed', failure: { message: 'no space' } });
});

test('F2: a pause whose answer never came is followed by a resume', async () => {
  const a = actions({ pause: () => Promise.reject(new Error('timed out')) });
  const freeze = new Freeze(a, testClock());
  await expect(freeze.begin()).rejects.toThrow('timed out');
  await freeze.end();
  expect(a.log).toEqual(['intend', 'resume', 'done']);
});

test('F2: a pause that was refused is followed by a resume only where the VM stands', async () => {
  const refused = {
    pause: () => Promise.reject(new Error('refused')),
    wasAnswered: () => true,
  };
  const runs = actions({ ...refused, isPaused: () => Promise.resolve(false) });
  const freeze = new Freeze(runs, testClock());
  await expect(freeze.begin()).rejects.toThrow('refused');
  await freeze.end();
  expect(runs.log).toEqual(['intend', 'done']);
  expect(freeze.span).toBeUndefined();
  const unsure = (): Promise<boolean> => Promise.reject(new Error('no answer'));
  for (const isPaused of [() => Promise.resolve(true), unsure]) {
    const stands = actions({ ...refused, isPaused });
    const other = new Freeze(stands, testClock());
    await expect(other.begin()).rejects.toThrow('refused');
    await other.end();
    expect(stands.log).toEqual(['intend', 'resume', 'done']);
    expect(other.state).toBe('resumed');
  }
});

test('F2: a pause that comes late, after the resume, is undone by another', async () => {
  const states = [true, false];
  const a = actions({
    pause: () => Promise.reject(new Error('timed out')),
    isPaused: () => Promise.resolve(states.shift() ?? false),
  });
  const clock = testClock();
  const freeze = new Freeze(a, clock);
  await expect(freeze.begin()).rejects.toThrow('timed out');
  await freeze.end();
  expect(a.log).toEqual(['intend', 'resume', 'resume', 'done']);
  expect([freeze.state, clock.slept]).toEqual(['resumed', [50]]);
});

test('F3: a freeze that never began ends without a call', async () => {
  const a = actions();
  await new Freeze(a, testClock()).end();
  expect(a.log).toEqual([]);
});

test('a resume that fails is tried again a bounded number of times, then left to recovery', async () => {
  let tries = 0;
  const clock = testClock();
  const a = actions({
    resume: () => {
      tries += 1;
      return Promise.reject(new Error('hung'));
    },
  });
  const freeze = new Freeze(a, clock);
  await freeze.begin();
  await freeze.end();
  expect(freeze.state).toBe('stuck');
  expect(tries).toBe(4);
  expect(clock.slept).toEqual([50, 200, 500]);
  expect(a.log).not.toContain('done');
});

test('a VM that is gone gets one resume, not a storm of them', async () => {
  let tries = 0;
  const a = actions({
    resume: () => {
      tries += 1;
      return Promise.reject(new Error('connection refused'));
    },
    surelyGone: () => true,
  });
  const freeze = new Freeze(a, testClock());
  await freeze.begin();
  await freeze.end();
  expect(tries).toBe(1);
  expect(freeze.state).toBe('stuck');
  expect(a.log).toContain('done');
});

test('F4: a capture that ended before its pause does not pause any more', async () => {
  const a = actions();
  const freeze = new Freeze(a, testClock());
  await freeze.end();
  await expect(freeze.begin()).rejects.toThrow('ended before its VM was paused');
  expect(a.log).toEqual([]);
});

test('an end that comes while the pause is on its way waits for its answer, then resumes', async () => {
  let answer: () => void = () => undefined;
  const a = actions({ pause: () => new Promise((resolve) => (answer = resolve)) });
  const freeze = new Freeze(a, testClock());
  const beginning = freeze.begin();
  const ending = freeze.end();
  expect(a.log).toEqual(['intend']);
  answer();
  await Promise.all([beginning, ending]);
  expect(a.log).toEqual(['intend', 'resume', 'done']);
});
