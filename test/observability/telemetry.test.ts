import { createServer, type Server } from 'node:http';
import type { AddressInfo } from 'node:net';
import { afterEach, expect, test } from 'vitest';
import { createTelemetry, type Telemetry } from '../../src/observability/telemetry.ts';

const options = { nodeId: 'n1', version: '0.1.0', otlpIntervalMs: 60_000, traceShare: 1 };
const closing: (() => Promise<unknown>)[] = [];
afterEach(async () => {
  for (const close of closing.splice(0)) await close();
});

function telemetryWith(otlpEndpoint?: string): Telemetry {
  const telemetry = createTelemetry({ ...options, otlpEndpoint });
  closing.push(() => telemetry.close());
  return telemetry;
}

/** Value of the one sample whose name and labels are exactly these. */
function sample(text: string, series: string): number | undefined {
  const line = text.split('\n').find((candidate) => candidate.startsWith(`${series} `));
  return line === undefined ? undefined : Number(line.slice(series.length + 1));
}

const stage = (name: string, frozenMs: number) => ({
  stage: name,
  startedMs: 0,
  endedMs: 20,
  busyMs: 10,
  frozenMs,
});

test('three good and two failed captures count so, and none is left in flight', async () => {
  const telemetry = telemetryWith();
  for (const outcome of ['published', 'published', 'published', 'aborted', 'aborted'] as const) {
    const record = telemetry.metrics.captureStarted();
    telemetry.metrics.frozen(250, [stage('read', 200)]);
    record.end(outcome, outcome === 'aborted' ? 'vm-exited' : null);
    record.end('aborted', 'counted-twice');
  }
  const text = await telemetry.render();
  expect(sample(text, 'varve_captures_total{outcome="published",reason="none"}')).toBe(3);
  expect(sample(text, 'varve_captures_total{outcome="aborted",reason="vm-exited"}')).toBe(2);
  expect(text).not.toContain('counted-twice');
  expect(sample(text, 'varve_captures_in_flight')).toBe(0);
  expect(sample(text, 'varve_frozen_seconds_count')).toBe(5);
  expect(sample(text, 'varve_stage_frozen_seconds_sum{stage="read"}')).toBeCloseTo(1);
});

test('labels stay bounded however many reasons there are', async () => {
  const { metrics, render } = telemetryWith();
  for (let i = 0; i < 500; i++) metrics.captureStarted().end('aborted', `kind-${i}`);
  metrics.captureStarted().end('aborted', 'No such kind: /var/lib/x');
  const series = (await render()).split('\n').filter((l) => l.startsWith('varve_captures_total{'));
  expect(series.length).toBeLessThanOrEqual(65);
  expect(sample(series.join('\n'), 'varve_captures_total{outcome="aborted",reason="other"}')).toBe(
    437,
  );
});

test('gauges are read when collected, summed over parts, gone when taken away', async () => {
  const { metrics, render } = telemetryWith();
  let depth = 1;
  const remove = metrics.observe({ queues: () => [{ stage: 'read', depth, max: 4 }] });
  metrics.observe({
    queues: () => [{ stage: 'read', depth: 2, max: 4 }],
    walBytes: () => [{ db: 'node', bytes: 4096 }],
  });
  depth = 3;
  const before = await render();
  expect(sample(before, 'varve_queue_depth{stage="read"}')).toBe(5);
  expect(sample(before, 'varve_queue_max{stage="read"}')).toBe(8);
  expect(sample(before, 'varve_wal_bytes{db="node"}')).toBe(4096);
  remove();
  expect(sample(await render(), 'varve_queue_depth{stage="read"}')).toBe(2);
});

test('an observable that throws hides only itself', async () => {
  const { metrics, render } = telemetryWith();
  metrics.observe({
    pendingPublishes: () => {
      throw new Error('database closed');
    },
    vms: () => ({ attached: 2, gone: 0 }),
  });
  const text = await render();
  expect(sample(text, 'varve_vms{state="attached"}')).toBe(2);
  expect(text).toContain('# not collected: Error: database closed');
  expect(sample(text, 'process_resident_memory_bytes')).toBeGreaterThan(1 << 20);
});

interface Pushed {
  readonly path: string;
  readonly body: unknown;
}

async function collector(): Promise<{ url: string; pushed: Pushed[]; server: Server }> {
  const pushed: Pushed[] = [];
  const server = createServer((request, response) => {
    const chunks: Buffer[] = [];
    request.on('data', (chunk: Buffer) => chunks.push(chunk));
    request.on('end', () => {
      pushed.push({ path: request.url ?? '', body: JSON.parse(Buffer.concat(chunks).toString()) });
      response.writeHead(200, { 'content-type': 'application/json' }).end('{}');
    });
  });
  await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
  closing.push(() => new Promise((resolve) => server.close(resolve)));
  const { port } = server.address() as AddressInfo;
  return { url: `http://127.0.0.1:${port}/`, pushed, server };
}

test('OTLP gets the same instruments, and a span per stage under one capture', async () => {
  const { url, pushed } = await collector();
  const telemetry = createTelemetry({ ...options, otlpEndpoint: url });
  telemetry.metrics.captureStarted().end('published', null);
  const capture = telemetry.tracer.begin({ captureId: 'c1', vmId: 'vm1' });
  capture.stage('pause').end();
  capture.stage('read').end({ failure: { kind: 'vm-exited', message: 'the VM exited' } });
  capture.end();
  await telemetry.close();
  const metrics = JSON.stringify(pushed.filter((p) => p.path === '/v1/metrics'));
  expect(metrics).toContain('varve_captures_total');
  const traces = pushed.filter((p) => p.path === '/v1/traces');
  const spans = traces.flatMap((p) => spansOf(p.body));
  expect(spans.map((s) => s.name).sort()).toEqual(['capture', 'stage pause', 'stage read']);
  expect(new Set(spans.map((s) => s.traceId))).toEqual(new Set([capture.traceId]));
  const root = spans.find((s) => s.name === 'capture');
  const read = spans.find((s) => s.name === 'stage read');
  expect(read?.parentSpanId).toBe(root?.spanId);
  expect(read?.status?.message).toBe('the VM exited');
});

interface PushedSpan {
  readonly name: string;
  readonly traceId: string;
  readonly spanId: string;
  readonly parentSpanId?: string;
  readonly status?: { readonly message?: string };
}

function spansOf(body: unknown): PushedSpan[] {
  const { resourceSpans } = body as {
    resourceSpans: { scopeSpans: { spans: PushedSpan[] }[] }[];
  };
  return resourceSpans.flatMap((r) => r.scopeSpans.flatMap((s) => s.spans));
}

test('a collector that is not there does not keep telemetry from closing', async () => {
  const telemetry = createTelemetry({ ...options, otlpEndpoint: 'http://127.0.0.1:9' });
  telemetry.tracer.begin({ captureId: 'c', vmId: 'v' }).end();
  await expect(telemetry.close()).resolves.toBeUndefined();
});

test('shadow checks count the pages that each source saw', async () => {
  const { metrics, render } = telemetryWith();
  const pages = { both: 90, primaryOnly: 4, shadowOnly: 3 };
  metrics.shadowed({ compared: 'all', ...pages });
  metrics.shadowed({ compared: 'nothing' });
  const text = await render();
  expect(sample(text, 'varve_shadow_pages_total{seen_by="both"}')).toBe(90);
  expect(sample(text, 'varve_shadow_pages_total{seen_by="primary"}')).toBe(4);
  expect(sample(text, 'varve_shadow_pages_total{seen_by="shadow"}')).toBe(3);
  expect(sample(text, 'varve_shadow_checks_total{compared="nothing"}')).toBe(1);
});
