import { existsSync } from 'node:fs';
import { join } from 'node:path';
import { expect, test, vi } from 'vitest';
import { PreparedEntries } from '../../src/capture/prepared-entries.ts';
import type { ForkView } from '../../src/capture/types.ts';
import { NodeDb } from '../../src/lineage/node-db.ts';
import { err } from '../../src/result.ts';
import { captureId } from '../../src/units.ts';
import { allHashes, firstDifference, Harness, never, valueOf, until } from './harness.ts';

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

test('a child that is not resumed at once is resumed later; one that never is, is not kept', async () => {
  await using harness = await Harness.make();
  await using source = await harness.vm({ dialect: 'aenv', memoryMib: 16 });
  const { vmId } = await harness.attach(source, { trackingMode: 'dirty' });
  const options = { dialect: 'aenv', start: false } as const;
  await using late = await harness.vm(options);
  await using stuck = await harness.vm(options);
  await late.fault({ on: 'resume', action: 'refuse' });
  await stuck.fault({ on: 'resume', action: 'refuse', times: 0 });
  const prepared = (captureId: string): string =>
    join(harness.config.paths.state, 'prepared', captureId);
  const kept = (): unknown => [harness.nodeDb.holdOwners(), harness.nodeDb.leases()];

  const forkTo = async (socketPath: string): Promise<ForkView> => {
    const made = valueOf(await harness.service.fork(vmId, { children: [{ socketPath }] }));
    await harness.service.waitFor(made.capture.captureId, never);
    return made;
  };
  const none = await forkTo(stuck.socketPath);
  expect(none.children).toMatchObject([{ vm: null, failure: { kind: 'vmm-refused' } }]);
  expect(harness.service.listVms().map((vm) => vm.vmId)).toEqual([vmId]);
  expect(existsSync(prepared(none.capture.captureId))).toBe(false);
  expect(kept()).toEqual([[], []]);

  const one = await forkTo(late.socketPath);
  expect(one.children[0]?.failure).toBeNull();
  expect((await late.info()).state).toBe('Running');
  valueOf(await harness.service.detach(one.children[0]?.vm?.vmId as never));
  expect(existsSync(prepared(one.capture.captureId))).toBe(false);
  expect(kept()).toEqual([[], []]);
});

test('a child that can neither be resumed nor taken off the record is told as both', async () => {
  await using harness = await Harness.make();
  await using source = await harness.vm({ dialect: 'aenv', memoryMib: 16 });
  const { vmId } = await harness.attach(source, { trackingMode: 'dirty' });
  await using stuck = await harness.vm({ dialect: 'aenv', start: false });
  await stuck.fault({ on: 'resume', action: 'refuse', times: 0 });
  const io = { kind: 'node-db-io', message: 'not now' } as const;
  using detach = vi.spyOn(NodeDb.prototype, 'detachVm').mockReturnValueOnce(err(io));
  const children = [{ socketPath: stuck.socketPath }];
  const [child] = valueOf(await harness.service.fork(vmId, { children })).children;
  expect(child?.failure?.kind).toBe('vmm-refused');
  expect(detach).toHaveBeenCalledOnce();
  expect(harness.service.getVm(child?.vm?.vmId as never)?.state).toBe('attached');
});

test('a VM that was attached to a snapshot stays so where the end of the restore is not recorded', async () => {
  await using harness = await Harness.make();
  await using source = await harness.vm({ dialect: 'aenv', memoryMib: 16 });
  const { vmId } = await harness.attach(source, { trackingMode: 'dirty' });
  const { snapshotId, layer } = await harness.published(vmId);
  await using copy = await harness.restore(snapshotId);
  const io = { kind: 'node-db-io', message: 'not now' } as const;
  using end = vi.spyOn(NodeDb.prototype, 'endNeed').mockReturnValueOnce(err(io));
  const attached = await harness.attach(copy, { launchParent: snapshotId });
  expect(attached.launchParent).toBe(layer);
  expect(end).toHaveBeenCalledOnce();
  expect(harness.warnings).toHaveLength(1);
  await harness.stop();
  await harness.start();
  const owners = harness.nodeDb.holdOwners().map(({ kind, id }) => [kind, id]);
  expect([owners, harness.nodeDb.leases()]).toEqual([[['vm', attached.vmId]], []]);
});

test('an entry does not end before its capture has, though the daemon stops', async () => {
  await using harness = await Harness.make();
  await using source = await harness.vm({ dialect: 'aenv', memoryMib: 16 });
  const { vmId } = await harness.attach(source, { trackingMode: 'dirty' });
  // The capture waits for this answer, whatever else it is told.
  await source.fault({ on: 'pause', action: 'delay', afterMs: 500 });
  const statuses: unknown[] = [];
  using end = vi.spyOn(PreparedEntries.prototype, 'end').mockImplementation((id) => {
    statuses.push(harness.service.getCapture(captureId(id))?.status);
    return Promise.resolve();
  });
  const children = [{ socketPath: join(harness.folder, 'none.sock') }];
  const forked = harness.service.fork(vmId, { children });
  await until(() => harness.pausedNow.size > 0);
  await harness.service.close();
  const answer = await forked;
  expect(answer.ok ? null : answer.error.kind).toBe('daemon-stopping');
  expect(end).toHaveBeenCalledOnce();
  expect(statuses).toEqual(['aborted']);
});
