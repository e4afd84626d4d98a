/** Input that would make a capture lie: each is refused, with what is wrong and where. */
import { randomUUID } from 'node:crypto';
import { chmod, copyFile, open, rename, rm, truncate, writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import { describe, expect, test } from 'vitest';
import { systemClock } from '../../src/clock.ts';
import { LayerWriter } from '../../src/layer/layer-writer.ts';
import type { LayerRef } from '../../src/lineage/layers.queries.ts';
import { NodeDb } from '../../src/lineage/node-db.ts';
import type { CaptureResult } from '../../src/capture/types.ts';
import type { RegionOption } from '../../src/minivm/client.ts';
import type { FaultBody } from '../../src/minivm/control-schema.ts';
import type { MiniVm } from '../../src/minivm/launch.ts';
import { bytes, layerUuid, vmId as toVmId, type LayerUuid, type VmId } from '../../src/units.ts';
import { identify } from '../../src/vmm/identity.ts';
import { attach, errorOf, must } from '../vmm/harness.ts';
import { allHashes, firstDifference, Harness, never, valueOf } from './harness.ts';

const MIB = 1024 * 1024;

async function answered(vm: MiniVm, operation: string): Promise<number> {
  const log = await vm.requests();
  return log.filter((entry) => entry.operation === operation && entry.status < 300).length;
}

/** A VM with one committed capture and something written since. */
async function captured(
  harness: Harness,
  options: Parameters<Harness['vm']>[0],
): Promise<{ vm: MiniVm; vmId: VmId; base: CaptureResult }> {
  const vm = await harness.vm({ memoryMib: 16, ...options });
  const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
  await vm.run({ pages: { firstPage: 1500, pageCount: 20 }, value: 1 });
  const base = await harness.published(vmId);
  await vm.run({ pages: { firstPage: 1600, pageCount: 5 }, value: 2 });
  await vm.clearRequests();
  return { vm, vmId, base };
}

async function expectRefusedUnpaused(
  harness: Harness,
  of: { readonly vm: MiniVm; readonly vmId: VmId },
  kind: string,
  reason: RegExp,
): Promise<void> {
  const refused = await harness.capture(of.vmId);
  expect(refused.status).toBe('aborted');
  expect(refused.failure?.kind).toBe(kind);
  expect(refused.failure?.message).toMatch(reason);
  expect(await answered(of.vm, 'pause')).toBe(0);
  expect((await of.vm.info()).state).toBe('Running');
  expect((await harness.leftovers()).staging).toEqual([]);
}

async function expectNextComplete(
  harness: Harness,
  of: { readonly vm: MiniVm; readonly vmId: VmId },
  options: Parameters<Harness['vm']>[0] = {},
): Promise<void> {
  await of.vm.run({ pages: { firstPage: 1700, pageCount: 3 }, value: 9 });
  const expected = await allHashes(of.vm);
  const made = await harness.published(of.vmId);
  await using copy = await harness.restore(made.snapshotId, options);
  expect(firstDifference(await allHashes(copy), expected)).toBeNull();
}

describe('tracking that is off in mode dirty is refused', () => {
  test.each(['firecracker', 'e2b'] as const)(
    'at the attach, or before the pause of a VM that booted without it afterwards (%s)',
    async (dialect) => {
      await using harness = await Harness.make();
      await using vm = await harness.vm({ dialect, start: false });
      const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
      expect((await vm.info()).tracking).toBe(true);
      await vm.configure({ memoryMib: 16, track: false });
      await vm.start();
      await expectRefusedUnpaused(
        harness,
        { vm, vmId },
        'tracking-off',
        /runs with track_dirty_pages = false/,
      );
      const again = await harness.service.attach({
        socketPath: vm.socketPath,
        trackingMode: 'dirty',
      });
      expect(again.ok ? 'attached' : again.error.kind).toBe('tracking-off');
      expect(await answered(vm, 'pause')).toBe(0);
    },
  );
});

test('swap is refused in mode mincore at the attach, and where it is turned on later', async () => {
  await using harness = await Harness.make();
  const swaps = join(harness.folder, 'swaps');
  const heading = 'Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n';
  await writeFile(swaps, heading);
  await using attached = await attach(
    { dialect: 'firecracker', memoryMib: 16, track: false },
    swaps,
  );
  const source = must(await attached.open('mincore'));
  must(await source.layout(never));
  await writeFile(
    swaps,
    `${heading}/swap\\040file                          file\t\t2097148\t\t0\t\t-2\n`,
  );
  const later = errorOf(await source.layout(never));
  expect(later.kind).toBe('swap-on');
  expect(later.message).toContain('/swap file');
  expect(errorOf(await attached.open('mincore')).kind).toBe('swap-on');
  expect(await answered(attached.vm, 'pause')).toBe(0);
});

test('swap changes nothing where page tables are asked, which see swapped pages', async () => {
  await using harness = await Harness.make();
  const swaps = join(harness.folder, 'swaps');
  await writeFile(swaps, 'Filename Type Size Used Priority\n/dev/sdb1 partition 100 0 -2\n');
  await using attached = await attach({ dialect: 'aenv', memoryMib: 16, track: false }, swaps);
  const source = must(await attached.open('mincore'));
  expect((await source.layout(never)).ok).toBe(true);
});

/** The second region ends within a word of its bitmap. */
const oddRegions: readonly RegionOption[] = [
  { guestAddress: 0n, bytes: 16 * MIB },
  { guestAddress: 0x1_0000_0000n, bytes: 65 * 4096 },
];

test('bitmaps too short, too long or past the end abort with one resume, and lose nothing', async () => {
  await using harness = await Harness.make();
  const of = await captured(harness, { dialect: 'e2b', regions: oddRegions });
  await using vm = of.vm;
  for (const [action, reason] of [
    ['bitmap-short', /bitmap.* is too short \(65\): the mappings take 66 words/],
    ['bitmap-long', /bitmap.* is too long: the mappings take 66 words/],
    ['bitmap-tail', /bitmap\[65\].* has bit 1 set, past the 65 pages of mappings\[1\]/],
  ] as const) {
    await vm.clearRequests();
    await vm.fault({ on: 'dirty', action });
    const failed = await harness.capture(of.vmId);
    expect(failed.failure?.kind).toBe('vmm-bad-answer');
    expect(failed.failure?.message).toMatch(reason);
    expect([await answered(vm, 'pause'), await answered(vm, 'resume')]).toEqual([1, 1]);
    expect((await harness.leftovers()).layers).toHaveLength(1);
  }
  await expectNextComplete(harness, of, { dialect: 'e2b' });
});

test.each([
  ['aenv', { on: 'dirty', action: 'page-size' }],
  ['e2b', { on: 'mappings', action: 'page-size' }],
] as const satisfies readonly (readonly [string, FaultBody])[])(
  'an unknown page size is refused before the pause (%s)',
  async (dialect, fault) => {
    await using harness = await Harness.make();
    const of = await captured(harness, { dialect });
    await using vm = of.vm;
    await vm.fault({ times: 0, ...fault });
    const reason = /page_size.* of 12288 bytes is not supported/;
    await expectRefusedUnpaused(harness, of, 'vmm-bad-answer', reason);
    await vm.clearFaults();
    await expectNextComplete(harness, of, { dialect });
  },
);

describe('a memory layout that changed between captures', () => {
  const two: readonly RegionOption[] = [
    { guestAddress: 0n, bytes: 16 * MIB },
    { guestAddress: 0x1_0000_0000n, bytes: 4 * MIB },
  ];
  test('is refused before the pause, until it is as it was', async () => {
    await using harness = await Harness.make();
    const of = await captured(harness, { dialect: 'e2b', regions: two });
    await using vm = of.vm;
    await vm.addRegion({ guestAddress: 0x2_0000_0000n, bytes: 4 * MIB });
    const added = /image offset 0x1400000 \(4194304 bytes\) was added/;
    await expectRefusedUnpaused(harness, of, 'layout-changed', added);
    await vm.dropRegion();
    await expectNextComplete(harness, of, { dialect: 'e2b' });
    await vm.clearRequests();
    await vm.dropRegion();
    const removed = /image offset 0x1000000 \(4194304 bytes\) was removed/;
    await expectRefusedUnpaused(harness, of, 'layout-changed', removed);
  });

  test('is refused before the pause where the VMM names dirty ranges only', async () => {
    await using harness = await Harness.make();
    const of = await captured(harness, { dialect: 'aenv' });
    await using vm = of.vm;
    await vm.addRegion({ guestAddress: 0x2_0000_0000n, bytes: 4 * MIB });
    const grown = /it has 20971520 bytes of memory now, 16777216 before/;
    await expectRefusedUnpaused(harness, of, 'layout-changed', grown);
  });

  test('is refused before the pause by a daemon that never saw the one before', async () => {
    await using harness = await Harness.make();
    const of = await captured(harness, { dialect: 'e2b', regions: two });
    await using vm = of.vm;
    await harness.stop();
    await vm.dropRegion();
    await harness.start();
    const reason = /it has 16777216 bytes of memory now, 20971520 at its last capture/;
    await expectRefusedUnpaused(harness, of, 'layout-changed', reason);
  });

  test('of upstream Firecracker, which does not say it, aborts with one resume', async () => {
    await using harness = await Harness.make();
    const of = await captured(harness, { dialect: 'firecracker', regions: two });
    await using vm = of.vm;
    await vm.addRegion({ guestAddress: 0x2_0000_0000n, bytes: 4 * MIB });
    const failed = await harness.capture(of.vmId);
    expect(failed.failure?.kind).toBe('layout-changed');
    expect(await answered(vm, 'pause')).toBe(await answered(vm, 'resume'));
    await vm.dropRegion();
    await expectNextComplete(harness, of, { dialect: 'firecracker' });
  });
});

/** Empty layers, each on the one before. */
async function emptyChain(folder: string, depth: number): Promise<LayerRef[]> {
  const chain: LayerRef[] = [];
  for (let at = 0; at < depth; at += 1) {
    const uuid = layerUuid(randomUUID());
    const parentUuid: LayerUuid | null = chain.at(-1)?.uuid ?? null;
    await using writer = await LayerWriter.create({
      path: join(folder, `${uuid}.lsmt`),
      uuid,
      parentUuid,
      virtualBytes: bytes(16 * MIB),
      compression: 'none',
      blockBytes: 4096,
    });
    chain.push(await writer.seal(never));
  }
  return chain;
}

test('a chain at its limit of 255 is refused before the pause', async () => {
  await using harness = await Harness.make({ lineage: { max_chain: 255 } });
  await using vm = await harness.vm({ dialect: 'e2b', memoryMib: 16 });
  await harness.stop();
  const chain = await emptyChain(harness.config.paths.layers, 255);
  const vmId = toVmId('at-the-limit');
  {
    using db = valueOf(NodeDb.open(join(harness.config.paths.state, 'node.db'), systemClock));
    using identity = valueOf(identify(vm.socketPath));
    const { pid, startTimeTicks } = identity;
    const facts = { dialect: 'e2b', trackingMode: 'dirty', imageBytes: bytes(16 * MIB) };
    const { socketPath } = vm;
    const launched = { launchParent: chain, trackedSinceLaunch: true };
    valueOf(db.attachVm({ vmId, socketPath, pid, startTimeTicks, ...facts, ...launched }));
  }
  // The chain is at its limit, and cannot be made shorter: a layer of it is not there any more.
  await rm(chain[7]?.path ?? '', { force: true });
  await harness.start();
  await vm.clearRequests();
  await expectRefusedUnpaused(harness, { vm, vmId }, 'chain-too-deep', /256 layers/);
});

describe('a layer of the memory parent that', () => {
  type Damage = (harness: Harness, path: string, base: CaptureResult) => Promise<void>;
  const damages: readonly (readonly [string, RegExp, Damage])[] = [
    ['layer-missing', /does not exist/, (_harness, path) => rename(path, `${path}.away`)],
    [
      'layer-not-a-layer',
      /is not an OverlayBD layer/,
      async (_harness, path) => {
        await keepAside(path);
        await overwrite(path, 0, 'damage');
      },
    ],
    [
      'layer-truncated',
      /is truncated/,
      async (_harness, path, base) => {
        await keepAside(path);
        await truncate(path, base.layerBytes - 4096);
      },
    ],
    [
      'layer-mismatch',
      /is not the recorded layer: it is .*, recorded is /,
      async (harness, path) => {
        await rename(path, `${path}.away`);
        const [other] = await emptyChain(harness.folder, 1);
        await copyFile(other?.path ?? '', path);
      },
    ],
  ];
  async function keepAside(path: string): Promise<void> {
    await copyFile(path, `${path}.copy`);
    await rename(path, `${path}.away`);
    await rename(`${path}.copy`, path);
    await chmod(path, 0o644);
  }
  async function overwrite(path: string, offset: number, text: string): Promise<void> {
    await using file = await open(path, 'r+');
    await file.write(Buffer.from(text), 0, text.length, offset);
  }
  test('is missing, damaged, cut or another one is refused before the pause', async () => {
    await using harness = await Harness.make();
    const of = await captured(harness, { dialect: 'aenv' });
    await using vm = of.vm;
    const path = join(harness.config.paths.layers, `${of.base.layer}.lsmt`);
    for (const [kind, reason, damage] of damages) {
      await damage(harness, path, of.base);
      await expectRefusedUnpaused(harness, of, kind, reason);
      await rename(`${path}.away`, path);
    }
    expect(await answered(vm, 'pause')).toBe(0);
    await expectNextComplete(harness, of, { dialect: 'aenv' });
  });
});
