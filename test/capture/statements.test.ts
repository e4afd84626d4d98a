import { expect, test } from 'vitest';
import { Harness, valueOf } from './harness.ts';

test('captures up to their publish, resumes, aborts, detaching and exits ask the catalog nothing', async () => {
  const log: string[] = [];
  const atPublish: number[] = [];
  await using harness = await Harness.make(
    {},
    {
      stage: (_capture, stage, state) => {
        if (stage === 'publish' && state === 'started') atPublish.push(log.length);
      },
    },
    { onStatement: (sql) => log.push(sql) },
  );
  await using vm = await harness.vm({ dialect: 'aenv', memoryMib: 32 });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  const base = await harness.published(vmId);
  await using copy = await harness.restore(base.snapshotId);
  await copy.resume();
  const options = { trackingMode: 'dirty', launchParent: base.snapshotId } as const;
  const { vmId: copyId } = await harness.attach(copy, options);
  expect(log.length).toBeGreaterThan(0);

  for (const id of [vmId, copyId]) {
    for (const resumeAfter of ['copy', 'publish'] as const) {
      log.length = 0;
      await harness.published(id, { resumeAfter });
      expect(atPublish.pop()).toBe(0);
      // The publish itself is seen: the log works.
      expect(log.length).toBeGreaterThan(0);
    }
  }
  log.length = 0;
  await copy.fault({ on: 'pause', action: 'refuse' });
  expect((await harness.capture(copyId)).status).toBe('aborted');
  valueOf(await harness.service.detach(copyId));
  expect(harness.nodeDb.countReleases()).toBe(1);
  await vm.kill();
  expect((await harness.capture(vmId)).status).toBe('aborted');
  expect(log).toEqual([]);
});
