import { expect, test } from 'vitest';
import { createLogger, logFor } from '../../src/observability/log.ts';

function capturing(): { lines: () => Record<string, unknown>[]; write: (line: string) => void } {
  const written: string[] = [];
  return {
    write: (line) => void written.push(line),
    lines: () => written.map((line) => JSON.parse(line) as Record<string, unknown>),
  };
}

test('lines are JSON with level, time, node and the ids that apply', () => {
  const out = capturing();
  const logger = createLogger({ level: 'info', nodeId: 'n1', destination: out });
  logFor(logger, { capture: 'c1', vm: 'v1', trace: undefined }).info({ pages: 3 }, 'captured');
  logger.debug('below the level');
  const [line, ...more] = out.lines();
  expect(more).toEqual([]);
  expect(line).toMatchObject({
    level: 'info',
    node: 'n1',
    capture: 'c1',
    vm: 'v1',
    pages: 3,
    msg: 'captured',
  });
  expect(line).not.toHaveProperty('trace');
  expect(Date.parse(String(line?.['time']))).not.toBeNaN();
});

test('tokens and passwords are not written', () => {
  const out = capturing();
  const logger = createLogger({ level: 'info', nodeId: 'n1', destination: out });
  logger.info({ headers: { authorization: 'Bearer very-secret' } }, 'request');
  logger.info({ catalog: { password: 'very-secret' }, token: 'very-secret' }, 'start');
  expect(JSON.stringify(out.lines())).not.toContain('very-secret');
  expect(JSON.stringify(out.lines())).toContain('[secret]');
});
