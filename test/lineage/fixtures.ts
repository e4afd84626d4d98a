/** What the lineage tests share: a real node.db in a temporary folder, and short ways to fill it. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { randomUUID } from 'node:crypto';
import { onTestFinished } from 'vitest';
import { systemClock } from '../../src/clock.ts';
import type { LayerRef } from '../../src/lineage/layers.queries.ts';
import { NodeDb } from '../../src/lineage/node-db.ts';
import type { VmRecord } from '../../src/lineage/vms.queries.ts';
import { emptyBitmap } from '../../src/vmm/bitmap.ts';
import type { PageBitmap } from '../../src/memory.ts';
import type { Result } from '../../src/result.ts';
import { bytes, captureId, digest, layerUuid, pageCount, vmId } from '../../src/units.ts';
import type { CaptureId, LayerUuid, VmId } from '../../src/units.ts';

export const PAGES = 1024;

export function mustOk<T, E>(result: Result<T, E>): T {
  if (!result.ok) throw new Error(`expected success, got ${JSON.stringify(result.error)}`);
  return result.value;
}

export function mustFail<T, E>(result: Result<T, E>): E {
  if (result.ok) throw new Error('expected a refusal');
  return result.error;
}

export function temporaryFolder(): string {
  const folder = mkdtempSync(join(tmpdir(), 'varve-lineage-'));
  onTestFinished(() => rmSync(folder, { recursive: true, force: true }));
  return folder;
}

export function openDb(folder = temporaryFolder()): NodeDb {
  const db = mustOk(NodeDb.open(join(folder, 'node.db'), systemClock));
  onTestFinished(() => db.close());
  return db;
}

export function pages(...which: number[]): PageBitmap {
  const map = emptyBitmap(pageCount(PAGES));
  for (const page of which) map.bits[page >> 3] = (map.bits[page >> 3] ?? 0) | (1 << (page & 7));
  return map;
}

export function pagesIn(map: PageBitmap | null | undefined): number[] {
  const found: number[] = [];
  if (map === null || map === undefined) return found;
  for (let page = 0; page < map.pageCount; page += 1) {
    if (((map.bits[page >> 3] ?? 0) >> (page & 7)) & 1) found.push(page);
  }
  return found;
}

export function layer(parentUuid: LayerUuid | null, o: Partial<LayerRef> = {}): LayerRef {
  const uuid = layerUuid(randomUUID());
  return {
    uuid,
    parentUuid,
    path: `/layers/${uuid}.lsmt`,
    digest: digest(`sha256:${randomUUID().replaceAll('-', '').repeat(2)}`),
    sizeBytes: bytes(8192),
    virtualBytes: bytes(PAGES * 4096),
    dataBytes: bytes(4096),
    ...o,
  };
}

export function chain(length: number): LayerRef[] {
  const layers: LayerRef[] = [];
  for (let i = 0; i < length; i += 1) layers.push(layer(layers.at(-1)?.uuid ?? null));
  return layers;
}

export function attach(
  db: NodeDb,
  o: { id?: string; launchParent?: LayerRef[]; trackedSinceLaunch?: boolean; pid?: number } = {},
): VmRecord {
  return mustOk(
    db.attachVm({
      vmId: vmId(o.id ?? 'vm-1'),
      socketPath: `/run/${o.id ?? 'vm-1'}.sock`,
      pid: o.pid ?? 4242,
      startTimeTicks: 9_007_199_254_740_993n,
      dialect: 'firecracker',
      trackingMode: 'dirty',
      imageBytes: bytes(PAGES * 4096),
      launchParent: o.launchParent ?? [],
      trackedSinceLaunch: o.trackedSinceLaunch ?? true,
    }),
  );
}

export interface Source {
  readonly clearsOnRead: boolean;
  readonly forgetsCommitted: boolean;
  readonly bytesIn: 'process' | 'file';
  readonly advance: boolean;
}

const ours = { forgetsCommitted: false, bytesIn: 'process', advance: true } as const;
export const clearing: Source = { ...ours, clearsOnRead: true };
export const keeping: Source = { ...ours, clearsOnRead: false };
/** The VMM has epochs of its own. */
export const forgetting: Source = { ...keeping, forgetsCommitted: true };

export function newJob(db: NodeDb, vm: VmId, id: string): CaptureId {
  const job = { captureId: captureId(id), vmId: vm, requestJson: '{}', createdAtMs: 1 };
  return mustOk(db.createJob(job)).job.captureId;
}

/** A capture up to `recorded`; returns what its layer must hold. */
export function captureTo(
  db: NodeDb,
  vm: VmId,
  id: string,
  o: { selected: number[]; zero?: number[]; source?: Source; widened?: boolean },
): { selected: number[]; zero: number[] } {
  const capture = newJob(db, vm, id);
  mustOk(db.begin(vm, capture, o.source ?? clearing));
  const zero = o.zero === undefined ? null : pages(...o.zero);
  const widened = o.widened ?? false;
  const sets = mustOk(db.recordSet(capture, { selected: pages(...o.selected), zero, widened }));
  return { selected: pagesIn(sets.selected), zero: pagesIn(sets.zero) };
}

/** From `recorded` to `committed`. */
export function finish(db: NodeDb, id: string): LayerRef {
  const made = layer(db.getJob(captureId(id))?.parentUuid ?? null);
  mustOk(db.sealed(captureId(id), made));
  mustOk(db.commit(captureId(id)));
  return made;
}

export const failed = { kind: 'disk-full', message: 'no space for the layer' };
