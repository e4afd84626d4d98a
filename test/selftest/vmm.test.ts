/**
 * Every case of `varve selftest` with the Firecracker that `VARVE_FIRECRACKER` names:
 * `make test-vmm FIRECRACKER=<path>`. Without one there is nothing here to run.
 */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, describe, expect, test } from 'vitest';
import { openSelftestDaemon } from '../../src/cli/selftest.ts';
import { allCases } from '../../src/selftest/cases.ts';
import { runSelftest } from '../../src/selftest/run.ts';

const binary = process.env['VARVE_FIRECRACKER'] ?? '';

describe.skipIf(binary === '')('a real Firecracker (VARVE_FIRECRACKER)', () => {
  const folder = mkdtempSync(join(tmpdir(), 'varve-vmm-'));
  afterAll(() => {
    rmSync(folder, { recursive: true, force: true });
  });

  test.each(allCases({ memoryMib: 256, twoRegions: true }).map((one) => [one.name, one] as const))(
    '%s: exact, or refused for a good reason',
    async (name, one) => {
      const outcomes = await runSelftest(
        {
          binaries: [binary],
          cases: [one],
          folder: join(folder, name.replace(/\W+/g, '-').slice(0, 20)),
          openDaemon: openSelftestDaemon,
          onStep: () => undefined,
          onCase: () => undefined,
        },
        new AbortController().signal,
      );
      const { verdict, reason } = outcomes[0]?.cases[0] ?? {};
      expect(['exact', 'refused', 'skipped'], reason?.message).toContain(verdict);
    },
    900_000,
  );
});
