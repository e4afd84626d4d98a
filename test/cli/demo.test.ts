import { existsSync, mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, expect, test } from 'vitest';
import type { DemoOutcome } from '../../src/cli/demo-report.ts';
import type { Finding } from '../../src/cli/finding.ts';
import { varve } from './run.ts';

const folder = mkdtempSync(join(tmpdir(), 'varve-demo-test-'));
afterAll(() => {
  rmSync(folder, { recursive: true });
});

test('the demo restores every page, and leaves its files where it says', async () => {
  const ran = await varve(['--json', 'demo', '--folder', folder]);
  expect(ran.stderr).toBe('');
  expect(ran.code).toBe(0);
  const outcome = JSON.parse(ran.stdout) as DemoOutcome;
  expect(outcome).toMatchObject({ differing: 0, runsOn: true, pages: 65_536 });
  expect(outcome.steps.map((step) => step.capture.status)).toEqual(Array(5).fill('published'));
  const [base, ...epochs] = outcome.steps.map((step) => step.capture.result?.layerBytes ?? 0);
  for (const bytes of epochs) expect(bytes).toBeLessThan((base ?? 0) / 2);
  for (const path of Object.values(outcome.files)) expect(existsSync(path)).toBe(true);
}, 180_000);

test('the doctor checks what the daemon needs, and fails on what cannot work', async () => {
  const config = join(import.meta.dirname, 'doctor-bad.toml');
  const ran = await varve(['--config', config, '--json', 'doctor']);
  expect(ran.code).toBe(1);
  const findings = JSON.parse(ran.stdout) as Finding[];
  const byCheck = new Map(findings.map((finding) => [finding.check, finding]));
  expect(byCheck.get('native-addon')?.level).toBe('ok');
  expect(byCheck.get('process-read')?.level).toBe('ok');
  expect(byCheck.get('listen')?.level).toBe('fail');
  expect(byCheck.get('folder state')?.level).toBe('fail');
  expect(byCheck.get('catalog')?.level).toBe('fail');
  for (const { level, advice } of findings) {
    if (level !== 'ok') expect(advice).toBeDefined();
  }
}, 120_000);
