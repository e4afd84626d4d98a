import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { expect, onTestFinished, test, vi } from 'vitest';
import { openParts } from '../../src/cli/parts.ts';
import { unsupervised } from '../../src/cli/supervise.ts';
import { catalogUrl, configOf } from '../../src/config/load.ts';
import { silentLogger } from '../../src/observability/log.ts';
import { holdId } from '../../src/units.ts';
import { lockedBy } from '../catalog/locker.ts';

test('closing gets to the VMs while a release of a hold waits for the catalog', async () => {
  const folder = await mkdtemp(join(tmpdir(), 'varve-parts-'));
  onTestFinished(() => rm(folder, { recursive: true, force: true }));
  const config = configOf({
    node: { id: 'test' },
    paths: { state: join(folder, 'state'), socket_roots: [folder] },
    catalog: { url: `sqlite:${join(folder, 'catalog.db')}`, lock_timeout: '5m' },
    pipeline: { slab_budget: '32MiB' },
  });
  const parts = await openParts({ config, logger: silentLogger(), supervise: unsupervised });
  expect(await parts.catalogTried).toMatchObject({ ok: true });
  const releaseMany = parts.catalog.releaseMany.bind(parts.catalog);
  const close = parts.service.close.bind(parts.service);
  const asked = new Promise<void>((resolve) => {
    vi.spyOn(parts.catalog, 'releaseMany').mockImplementationOnce((holds) => {
      resolve();
      return releaseMany(holds);
    });
  });
  const serviceClosed = new Promise<void>((resolve) => {
    vi.spyOn(parts.service, 'close').mockImplementationOnce(() => close().finally(resolve));
  });
  await using other = await lockedBy(catalogUrl(config.catalog).slice('sqlite:'.length));
  expect(parts.nodeDb.queueRelease(holdId('owed')).ok).toBe(true);
  await asked;
  let allClosed = false;
  const closing = parts[Symbol.asyncDispose]().then(() => (allClosed = true));
  await serviceClosed;
  expect(allClosed).toBe(false);
  await other.end();
  await closing;
}, 180_000);
