/**
 * Layers against the libraries and system calls called bare in C, on the same data, one thread, in
 * one run. Ratios are ours ÷ bare for speeds, so more is better; for reads, 32 layers ÷ one.
 * All but sealing is timed in processor time, sealing by the clock.
 */
import { execFileSync } from 'node:child_process';
import { createHash, randomUUID } from 'node:crypto';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { compressBatch, compressBound } from '../src/layer/compress.ts';
import type { Compression } from '../src/layer/format.ts';
import { LayerStack } from '../src/layer/layer-stack.ts';
import { LayerWriter } from '../src/layer/layer-writer.ts';
import { compareWithStack, readStackNow } from '../src/layer/shared-stack.ts';
import type { SharedStack } from '../src/layer/shared-stack.ts';
import type { LayerUuid } from '../src/units.ts';
import { bytes, GIB, layerUuid, MIB, PAGE_BYTES } from '../src/units.ts';
import { median } from './bare.ts';
import { projectRoot } from './daemon.ts';

export interface Sizes {
  readonly rounds: number;
  /** Data that is compressed and decompressed. */
  readonly dataMib: number;
  readonly sealBytes: number;
  readonly randomReads: number;
}

export const sizes = {
  smoke: { rounds: 1, dataMib: 8, sealBytes: 16 * MIB, randomReads: 2000 },
  full: { rounds: 7, dataMib: 128, sealBytes: GIB, randomReads: 200_000 },
} as const satisfies Record<string, Sizes>;

type Print = (line: string) => void;

const STEP = 4 * MIB;
const never = new AbortController().signal;

interface Place {
  readonly folder: string;
  readonly size: Sizes;
  readonly print: Print;
}

/** Guest-like bytes: of every 8 pages 3 text, 2 pointers, 2 sparse, 1 noise. Seeded. */
function guestLike(length: number): Uint8Array {
  const out = new Uint8Array(new SharedArrayBuffer(length));
  const words = new Uint32Array(out.buffer);
  let state = 20_261_130;
  const next = (): number => {
    state ^= state << 13;
    state ^= state >>> 17;
    state ^= state << 5;
    return state >>> 0;
  };
  for (let page = 0; page * PAGE_BYTES < length; page += 1) {
    const kind = page % 8;
    const at = (page * PAGE_BYTES) / 4;
    for (let i = 0; i < PAGE_BYTES / 4; i += 1) {
      if (kind < 3) words[at + i] = 0x20_61_65_74 + (next() & 0x07_03_07_03);
      else if (kind < 5) words[at + i] = i % 2 === 1 ? 0x7f3a : 0x10_000_000 + (next() & 0xffff8);
      else if (kind < 7) words[at + i] = next() % 16 === 0 ? next() & 0xff : 0;
      else words[at + i] = next();
    }
  }
  return out;
}

interface Bare {
  readonly seconds: number;
  readonly stored: number;
}

function bare(args: readonly string[]): Bare {
  const program = join(projectRoot, 'native/bench/out/bare_layer');
  return JSON.parse(execFileSync(program, args, { encoding: 'utf8' })) as Bare;
}

/** Processor time: comparable to one bare thread, whoever else is running. */
const cpuSeconds = (run: () => void): number => {
  const before = process.cpuUsage();
  run();
  const { user, system } = process.cpuUsage(before);
  return (user + system) / 1e6;
};

const speed = (length: number, took: number): string => `${(length / took / 1e6).toFixed(0)} MB/s`;

/** The whole slab as rows of STEP, in layers that hold `every`th page from `first` where given. */
async function writeImage(
  folder: string,
  data: Uint8Array,
  compression: Compression,
  pages: { readonly first: number; readonly every: number; readonly parent: LayerUuid | null },
): Promise<{ readonly path: string; readonly uuid: LayerUuid }> {
  const uuid = layerUuid(randomUUID());
  const path = join(folder, uuid);
  await using writer = await LayerWriter.create({
    path,
    uuid,
    parentUuid: pages.parent,
    virtualBytes: bytes(data.length),
    compression,
    blockBytes: 4096,
  });
  for (let at = 0; at < data.length; at += STEP) {
    const slab = data.subarray(at, at + STEP);
    const rows: bigint[] = [];
    if (pages.every === 1) rows.push(BigInt(at), BigInt(slab.length), 0n);
    for (let page = 0; page * PAGE_BYTES < slab.length && pages.every > 1; page += 1) {
      const image = at + page * PAGE_BYTES;
      if ((image / PAGE_BYTES) % pages.every !== pages.first) continue;
      rows.push(BigInt(image), BigInt(PAGE_BYTES), BigInt(page * PAGE_BYTES));
    }
    const batch = { slab, rows: BigUint64Array.from(rows) };
    if (compression === 'none') {
      await writer.append(batch);
      continue;
    }
    const out = new Uint8Array(compressBound(compression, 4096, STEP));
    const made = compressBatch({ ...batch, out, algorithm: compression, blockBytes: 4096 });
    await writer.append({ ...batch, compressed: made ?? undefined });
  }
  await writer.seal(never);
  return { path, uuid };
}

async function openShared(paths: readonly string[]): Promise<LayerStack> {
  const opened = await LayerStack.open(paths);
  if (!opened.ok) throw new Error(opened.error.message);
  return opened.value;
}

function compressSpeed({ folder, size, print }: Place, data: Uint8Array): void {
  const file = join(folder, 'data');
  writeFileSync(file, data);
  const out = new Uint8Array(compressBound('lz4', 4096, STEP));
  const request = { out, algorithm: 'lz4', blockBytes: 4096 } as const;
  let stored = 0;
  const pass = (): void => {
    stored = 0;
    for (let at = 0; at < data.length; at += STEP) {
      const slab = data.subarray(at, at + STEP);
      const rows = BigUint64Array.from([0n, BigInt(slab.length), 0n]);
      const made = compressBatch({ ...request, slab, rows });
      stored += made?.blocks.length ?? NaN;
    }
  };
  pass();
  const ratios: number[] = [];
  let ours = 0;
  for (let round = 0; round < size.rounds; round += 1) {
    pass(); // warm again: the opponent had the caches
    ours = cpuSeconds(pass);
    const theirs = bare(['compress', file, '4096', '1']);
    ratios.push(theirs.seconds / ours);
  }
  print(
    `compress lz4: ${speed(data.length, ours)}, ratio to bare ${median(ratios).toFixed(2)} ` +
      `(goal >= 0.85), ${data.length} -> ${stored} bytes`,
  );
}

async function decompressSpeed({ folder, size, print }: Place, data: Uint8Array): Promise<void> {
  const file = join(folder, 'data');
  const all = { first: 0, every: 1, parent: null };
  const { path } = await writeImage(folder, data, 'lz4', all);
  await using stack = await openShared([path]);
  const into = new Uint8Array(data.length).fill(1);
  const pass = (): void => {
    for (let at = 0; at < data.length; at += STEP) {
      const read = readStackNow(stack.shared(), bytes(at), into.subarray(at, at + STEP));
      if (!read.ok) throw new Error(read.error.message);
    }
  };
  pass();
  const ratios: number[] = [];
  let ours = 0;
  for (let round = 0; round < size.rounds; round += 1) {
    pass(); // warm again: the opponent had the caches
    ours = cpuSeconds(pass);
    ratios.push(bare(['decompress', file, '4096', '1']).seconds / ours);
  }
  const same = Buffer.compare(into, data) === 0 ? 'bytes right' : 'BYTES WRONG';
  print(
    `decompress lz4, file and CRCs included: ${speed(data.length, ours)}, ratio to bare ` +
      `${median(ratios).toFixed(2)} (goal >= 0.85), ${same}`,
  );
}

async function sealOnce(folder: string, slabs: readonly Uint8Array[], total: number) {
  const path = join(folder, 'sealed');
  const start = process.hrtime.bigint();
  await using writer = await LayerWriter.create({
    path,
    uuid: layerUuid(randomUUID()),
    parentUuid: null,
    virtualBytes: bytes(total),
    compression: 'none',
    blockBytes: 4096,
  });
  const busy: Promise<void>[] = slabs.map(() => Promise.resolve());
  for (let at = 0; at < total; at += STEP) {
    const turn = (at / STEP) % slabs.length;
    await busy[turn];
    const rows = BigUint64Array.from([BigInt(at), BigInt(STEP), 0n]);
    busy[turn] = writer.append({ slab: slabs[turn] ?? new Uint8Array(0), rows });
  }
  await Promise.all(busy);
  const sealed = await writer.seal(never);
  const took = Number(process.hrtime.bigint() - start) / 1e9;
  rmSync(path);
  return { took, digest: sealed.digest };
}

async function sealSpeed({ folder, size, print }: Place): Promise<void> {
  const slabs = Array.from({ length: 4 }, () => {
    const slab = new Uint8Array(new SharedArrayBuffer(STEP));
    for (let i = 0; i < STEP; i += 1) slab[i] = (i * 7 + (i >> 8)) & 0xff;
    return slab;
  });
  const ratios: number[] = [];
  let took = 0;
  for (let round = 0; round < size.rounds; round += 1) {
    const theirs = bare(['seal', join(folder, 'bare'), String(size.sealBytes)]);
    ({ took } = await sealOnce(folder, slabs, size.sealBytes));
    ratios.push(theirs.seconds / took);
  }
  print(
    `seal ${size.sealBytes / MIB} MiB raw: ${speed(size.sealBytes, took)}, ratio to bare ` +
      `pwrite+sha256+fsync ${median(ratios).toFixed(2)} (goal >= 0.7)`,
  );
}

/** Microseconds of one random page read. */
function randomRead(stack: SharedStack, count: number): number {
  const page = new Uint8Array(PAGE_BYTES);
  let state = 12345;
  const took = cpuSeconds(() => {
    for (let i = 0; i < count; i += 1) {
      state = (Math.imul(state, 1_664_525) + 1_013_904_223) >>> 0;
      const at = (state % (stack.virtualBytes / PAGE_BYTES)) * PAGE_BYTES;
      readStackNow(stack, bytes(at), page);
    }
  });
  return (took / count) * 1e6;
}

async function stackReads({ folder, size, print }: Place, data: Uint8Array): Promise<void> {
  const one = await writeImage(folder, data, 'none', { first: 0, every: 1, parent: null });
  const paths: string[] = [];
  let parent: LayerUuid | null = null;
  for (let first = 0; first < 32; first += 1) {
    const made = await writeImage(folder, data, 'none', { first, every: 32, parent });
    parent = made.uuid;
    paths.push(made.path);
  }
  await using single = await openShared([one.path]);
  await using deep = await openShared(paths);
  const ratios: number[] = [];
  let last = [0, 0];
  for (let round = 0; round < size.rounds; round += 1) {
    last = [single, deep].map((stack) => randomRead(stack.shared(), size.randomReads));
    ratios.push((last[1] ?? NaN) / (last[0] ?? NaN));
  }
  print(
    `random 4 KiB reads: ${(last[0] ?? NaN).toFixed(2)} us through one layer, ` +
      `${(last[1] ?? NaN).toFixed(2)} us through 32, ratio ${median(ratios).toFixed(2)} (goal <= 3)`,
  );
  comparisons({ folder, size, print }, data, [single, deep]);
}

/** Cost of dedup per page, for pages that are equal. */
function comparisons(
  { size, print }: Place,
  data: Uint8Array,
  stacks: readonly LayerStack[],
): void {
  const costs = stacks.map((stack) => {
    const times: number[] = [];
    for (let round = 0; round < size.rounds; round += 1) {
      const took = cpuSeconds(() => {
        for (let at = 0; at < data.length; at += STEP) {
          const slab = data.subarray(at, at + STEP);
          const rows = BigUint64Array.from([BigInt(at), BigInt(slab.length), 0n]);
          const equal = compareWithStack({ stack: stack.shared(), slab, rows });
          if (!equal.ok || equal.value[0] !== 0xff) throw new Error('pages must be equal');
        }
      });
      times.push((took / (data.length / PAGE_BYTES)) * 1e9);
    }
    return `${median(times).toFixed(0)} ns`;
  });
  print(`compare a page with its parent: ${costs[0] ?? ''} in one layer, ${costs[1] ?? ''} in 32`);
}

export async function layerBench(size: Sizes, print: Print): Promise<void> {
  const folder = mkdtempSync(join(tmpdir(), 'varve-layer-bench-'));
  const place = { folder, size, print };
  try {
    const data = guestLike(size.dataMib * MIB);
    print(`layer bench: sha256 of the data ${createHash('sha256').update(data).digest('hex')}`);
    compressSpeed(place, data);
    await decompressSpeed(place, data);
    await sealSpeed(place);
    await stackReads(place, data);
  } finally {
    rmSync(folder, { recursive: true, force: true });
  }
}
