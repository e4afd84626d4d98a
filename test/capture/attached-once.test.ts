/** A VM is a process: attached once, whatever ids, sockets and links to sockets name it. */
import { symlink } from 'node:fs/promises';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { vmId } from '../../src/units.ts';
import { allBytes, firstDifferingPage, Harness, valueOf } from './harness.ts';

test('a second name for an attached VM is refused with the first, and no page is lost', async () => {
  await using harness = await Harness.make();
  await using vm = await harness.vm({ dialect: 'firecracker', memoryMib: 16 });
  const link = join(harness.folder, 'link.sock');
  await symlink(vm.socketPath, link);
  const attach = (id: string, socketPath: string) =>
    harness.service.attach({ socketPath, vmId: vmId(id), trackingMode: 'dirty' });
  valueOf(await attach('a', vm.socketPath));
  for (const path of [vm.socketPath, link]) {
    expect(await attach('b', path)).toMatchObject({
      ok: false,
      error: { kind: 'vm-attached', facts: { vmId: 'a' } },
    });
  }
  // Under its own name it is the same VM.
  expect(valueOf(await attach('a', link)).vmId).toBe('a');
  expect(harness.service.listVms().map((each) => each.vmId)).toEqual(['a']);

  for (const value of [1, 2, 3]) {
    await vm.run({ pages: { firstPage: 1000 + value * 500, pageCount: 500 }, value });
    const made = await harness.published(vmId('a'));
    const memory = await harness.memoryOf(made.snapshotId);
    expect(firstDifferingPage(memory, await allBytes(vm))).toBeNull();
  }
  valueOf(await harness.service.detach(vmId('a')));
  valueOf(await attach('b', link));
  const [first] = await Promise.all(['b', 'c'].map((id) => attach(id, vm.socketPath)));
  expect(first?.ok).toBe(true);
  expect(harness.service.listVms()).toHaveLength(1);
});

test('of two attaches at once under two names one is refused', async () => {
  await using harness = await Harness.make();
  await using vm = await harness.vm({ dialect: 'e2b', memoryMib: 16 });
  const attach = (id: string) =>
    harness.service.attach({ socketPath: vm.socketPath, vmId: vmId(id) });
  const outcomes = await Promise.all(['a', 'b', 'c'].map(attach));
  expect(outcomes.filter(({ ok }) => ok)).toHaveLength(1);
  expect(harness.service.listVms()).toHaveLength(1);
});
