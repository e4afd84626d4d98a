import { expect, test } from 'vitest';
import { createObserver } from '../../src/cli/daemon-observer.ts';
import { createLogger, logFor } from '../../src/observability/log.ts';
import { createTelemetry } from '../../src/observability/telemetry.ts';
import { captureId, pageCount, vmId } from '../../src/units.ts';

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

test('pages that a VMM missed are warned of, with the capture; none missed is no line', async () => {
  const out = capturing();
  const logger = createLogger({ level: 'info', nodeId: 'n1', destination: out });
  const settings = { nodeId: 'n1', version: '0.1.0', otlpIntervalMs: 60_000, traceShare: 1 };
  const telemetry = createTelemetry(settings);
  const { metrics, tracer } = telemetry;
  const observer = createObserver({ metrics, tracer, logger, queueMax: () => 1, slabBudget: 0 });
  const capture = { captureId: captureId('c1'), vmId: vmId('v1') };
  const pages = { both: pageCount(9), primaryOnly: pageCount(2) };
  observer.shadowed(capture, { compared: 'all', ...pages, shadowOnly: pageCount(0) });
  observer.shadowed(capture, { compared: 'nothing', reason: 'a fresh VM' });
  expect(out.lines()).toEqual([]);
  observer.shadowed(capture, { compared: 'all', ...pages, shadowOnly: pageCount(3) });
  expect(out.lines()).toMatchObject([{ level: 'warn', capture: 'c1', report: { shadowOnly: 3 } }]);
  await telemetry.close();
});
