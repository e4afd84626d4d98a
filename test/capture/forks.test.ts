import { existsSync } from 'node:fs';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { allHashes, firstDifference, Harness, valueOf } from './harness.ts';

test('children of a fork start as the source was, then go their own ways; one that fails harms none', async () => {
  await using harness = await Harness.make();
  await using source = await harness.vm({ dialect: 'aenv', memoryMib: 32 });
  const { vmId } = await harness.attach(source, { trackingMode: 'dirty' });
  await source.run({ pages: { firstPage: 2000, pageCount: 50 }, value: 1 });
  const expected = await allHashes(source);
  await using left = await harness.vm({ dialect: 'aenv', start: false });
  await using right = await harness.vm({ dialect: 'aenv', start: false });
  const missing = join(harness.folder, 'none.sock');
  const fork = valueOf(
    await harness.service.fork(vmId, {
      children: [left, right, { socketPath: missing }].map(({ socketPath }) => ({ socketPath })),
    }),
  );
  expect(fork.children.map((child) => child.failure?.kind ?? 'started')).toEqual([
    'started',
    'started',
    'path-missing',
  ]);
  const [leftVm, rightVm] = fork.children.map((child) => child.vm);
  expect(leftVm?.launchParent).toBe(fork.capture.result?.layer);
  expect(firstDifference(await left.hashes(1024, 6000), expected.subarray(1024, 7024))).toBeNull();
  expect((await left.info()).state).toBe('Running');

  await left.run({ pages: { firstPage: 3000, pageCount: 5 }, value: 2 });
  await right.run({ pages: { firstPage: 4000, pageCount: 5 }, value: 3 });
  const leftNow = await allHashes(left);
  const rightNow = await allHashes(right);
  const leftMade = await harness.published(leftVm?.vmId as never);
  const rightMade = await harness.published(rightVm?.vmId as never);
  expect(leftMade.predecessor).toBe(fork.capture.result?.layer);
  expect(rightMade.predecessor).toBe(fork.capture.result?.layer);
  expect(leftMade.dataBytes).toBeLessThan(40 * 4096);
  await using leftCopy = await harness.restore(leftMade.snapshotId);
  await using rightCopy = await harness.restore(rightMade.snapshotId);
  expect(firstDifference(await allHashes(leftCopy), leftNow)).toBeNull();
  expect(firstDifference(await allHashes(rightCopy), rightNow)).toBeNull();

  const prepared = join(harness.config.paths.state, 'prepared', fork.capture.captureId);
  valueOf(await harness.service.detach(leftVm?.vmId as never));
  expect(existsSync(prepared)).toBe(true);
  valueOf(await harness.service.detach(rightVm?.vmId as never));
  expect(existsSync(prepared)).toBe(false);
});
