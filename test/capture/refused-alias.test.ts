/** A name that the catalog refuses for good keeps no committed capture from being published. */
import { join } from 'node:path';
import Sqlite from 'better-sqlite3';
import { expect, test } from 'vitest';
import type { Catalog } from '../../src/catalog/catalog.ts';
import type { OpenCatalog } from '../../src/catalog/open.ts';
import { err } from '../../src/result.ts';
import { Harness, until, valueOf } from './harness.ts';

test('a capture is refused for its alias before anything is recorded', async () => {
  await using harness = await Harness.make();
  await using vm = await harness.vm({ dialect: 'e2b', memoryMib: 16 });
  const { vmId } = await harness.attach(vm);
  const refused = await harness.service.startCapture(vmId, { alias: 'Web-Ready' });
  expect(refused).toMatchObject({ ok: false, error: { kind: 'request-invalid' } });
  expect(harness.service.listCaptures(vmId)).toEqual([]);
});

test('one that an earlier program took is published without the alias at the next start', async () => {
  const away = { on: true };
  const around = (real: OpenCatalog): Catalog =>
    new Proxy<Catalog>(real, {
      get: (target, name) =>
        name === 'publish' && away.on
          ? () => Promise.resolve(err({ kind: 'catalog-unavailable', message: 'not now' }))
          : (Reflect.get(target, name) as unknown),
    });
  await using harness = await Harness.make({}, {}, { around });
  await using vm = await harness.vm({ dialect: 'e2b', memoryMib: 16 });
  const { vmId } = await harness.attach(vm);
  const { captureId } = await harness.startCapture(vmId, { alias: 'web', resumeAfter: 'commit' });
  await until(() => harness.service.getCapture(captureId)?.status === 'committed');
  await harness.stop();
  const raw = new Sqlite(join(harness.config.paths.state, 'node.db'));
  raw
    .prepare(
      `UPDATE capture_job SET publish_json = json_set(publish_json, '$.alias', 'Web Ready'),
       result_json = json_set(result_json, '$.result.alias', 'Web Ready')`,
    )
    .run();
  raw.close();
  away.on = false;
  await harness.start();
  await until(() => harness.service.getCapture(captureId)?.status === 'published');
  const { result } = harness.service.getCapture(captureId) ?? {};
  expect(result).toMatchObject({ alias: null, aliasProblem: { kind: 'request-invalid' } });
  const snapshot = valueOf(await harness.catalog.show(result?.snapshotId ?? ''));
  expect(snapshot.aliases).toEqual([]);
});
