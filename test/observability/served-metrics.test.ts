/** What a real daemon serves at /metrics, against what the shipped alerts and dashboard ask for. */
import { readFileSync, renameSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { launchMiniVm } from '../../src/minivm/launch.ts';
import { temporaryFolder } from '../lineage/fixtures.ts';
import { Daemon } from '../lineage/served.ts';

interface Asked {
  readonly name: string;
  /** Labels that the expression matches on or groups by. */
  readonly labels: readonly string[];
}

const functions = new Set(['rate', 'increase', 'sum', 'max', 'by', 'and', 'histogram_quantile']);

/** The series that an expression of ours reads. Labels of grouping count for all of them. */
function seriesOf(expression: string): Asked[] {
  const grouped = [...expression.matchAll(/\bby \(([^)]*)\)/g)].flatMap(([, list]) =>
    (list ?? '').split(',').map((label) => label.trim()),
  );
  const bare = expression.replaceAll(/\bby \([^)]*\)/g, '');
  const named = [...bare.matchAll(/\b([a-z_]{3,}[a-z])(\{[^}]*\})?/g)];
  return named.flatMap(([, name, matchers]) => {
    if (name === undefined || functions.has(name)) return [];
    if (!name.startsWith('varve_') && !name.startsWith('process_')) return [];
    const matched = [...(matchers ?? '').matchAll(/([a-z]+)(?:=|!=|=~|!~)"/g)].flatMap(
      ([, label]) => label ?? [],
    );
    return { name, labels: [...new Set([...grouped, ...matched])] };
  });
}

/** Label names per metric name, of every sample. */
function served(text: string): Map<string, Set<string>> {
  const samples = new Map<string, Set<string>>();
  for (const line of text.split('\n')) {
    const match = /^([a-z_]+)(?:\{(.*)\})? \S+$/.exec(line);
    if (match?.[1] === undefined) continue;
    const labels = samples.get(match[1]) ?? new Set<string>();
    for (const [, label] of (match[2] ?? '').matchAll(/([a-z]+)="/g)) labels.add(label ?? '');
    samples.set(match[1], labels);
  }
  return samples;
}

function sample(text: string, series: string): number {
  const line = text.split('\n').find((candidate) => candidate.startsWith(`${series} `));
  return Number(line?.slice(series.length + 1));
}

const read = (path: string): string => readFileSync(join(process.cwd(), path), 'utf8');

function askedFor(): Asked[] {
  const dashboard = JSON.parse(read('config/grafana-dashboard.json')) as {
    readonly panels: readonly { readonly targets: readonly { readonly expr: string }[] }[];
  };
  const panels = dashboard.panels.flatMap(({ targets }) => targets.map(({ expr }) => expr));
  // An alert's expression is on the line of its key, or on the deeper lines below it.
  const alerts = [
    ...read('config/prometheus-rules.yml').matchAll(/ expr: (>\n(?: {10}.*\n)+|.*)/g),
  ];
  expect(alerts.length).toBeGreaterThan(8);
  const expressions = [...panels, ...alerts.map(([, text]) => String(text))];
  return expressions.flatMap(seriesOf);
}

const prometheusOwn = new Set(['instance', 'le', 'job']);

test('each alert and panel reads metrics that a daemon serves, and the gauges say what is so', async () => {
  const folder = temporaryFolder();
  const socketPath = join(folder, 'vm.sock');
  await using vm = await launchMiniVm({
    id: 'vm',
    dialect: 'e2b',
    memoryMib: 32,
    socketPath,
  });
  const retries = '[pipeline.publish]\nretry_min = "10ms"\nretry_max = "100ms"\n';
  await using daemon = new Daemon(folder, retries);
  const scrape = async (): Promise<string> => {
    const answer = await daemon.text('/metrics');
    expect(answer).not.toContain('not collected');
    return answer;
  };
  await daemon.start();
  await daemon.attach({ socketPath, trackingMode: 'dirty' });
  await vm.run({ pages: { firstPage: 2000, pageCount: 100 }, value: 1 });
  const made = await daemon.ended((await daemon.startCapture('vm')).captureId);
  const id = made.result?.snapshotId ?? '';
  const held = await daemon.send('POST', '/v1/holds', {
    target: { snapshot: id },
    purpose: 'test',
  });
  expect(held.status).toBe(201);
  expect((await daemon.send('POST', '/v1/gc/runs', {})).status).toBeLessThan(300);

  const text = await scrape();
  const there = served(text);
  const missing = askedFor().flatMap(({ name, labels }) => {
    const found = there.get(name);
    if (found === undefined) return [`${name}: no sample`];
    return labels
      .filter((label) => !found.has(label) && !prometheusOwn.has(label))
      .map((label) => `${name}: no label ${label}`);
  });
  expect(missing).toEqual([]);
  expect(sample(text, 'varve_holds_open')).toBe(1);
  expect(sample(text, 'varve_holds_taken_total{purpose="test"}')).toBe(1);
  expect(sample(text, 'varve_publishes_pending')).toBe(0);
  expect(sample(text, 'varve_gc_backlog')).toBe(0);

  // Two captures that the store refuses; a daemon that dies with them, and gives their uploads up.
  const manifests = join(folder, 'state/artifacts/manifest');
  renameSync(manifests, join(folder, 'manifests'));
  writeFileSync(manifests, 'in the way');
  for (const count of [1, 2]) {
    const { captureId } = await daemon.startCapture('vm', { resumeAfter: 'commit' });
    while ((await daemon.show(captureId)).failure === null);
    expect(sample(await scrape(), 'varve_publishes_pending')).toBe(count);
  }
  await daemon.send('DELETE', `/v1/holds/${(held.body as { id: string }).id}`);
  expect(sample(await scrape(), 'varve_holds_open')).toBe(0);
  await daemon.kill();
  await daemon.start();
  while (sample(await scrape(), 'varve_gc_backlog') === 0);
  expect(sample(await scrape(), 'varve_publishes_pending')).toBe(2);
});
