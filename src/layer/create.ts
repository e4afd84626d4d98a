/**
 * Makes a layer of a sparse raw file: its data extents become segments, its holes stay holes.
 */
import { open } from 'node:fs/promises';
import type { FileHandle } from 'node:fs/promises';
import { fileExtents } from '../native/guest.ts';
import type { Result } from '../result.ts';
import { err, Failure, ok, systemCode } from '../result.ts';
import { bytes, PAGE_BYTES, pagesCeil, SECTOR_BYTES } from '../units.ts';
import type { LayerUuid } from '../units.ts';
import type { LayerReadError, LayerWriteError } from './errors.ts';
import type { Progress } from './flatten.ts';
import type { Compression } from './format.ts';
import { LayerWriter } from './layer-writer.ts';
import type { SealedLayer } from './layer-writer.ts';
import { pumpRows, STEP_BYTES, STEP_ROWS } from './pump.ts';

export interface CreateOptions {
  /** Sparse raw file; its size, a whole number of sectors, is the layer's virtual size. */
  readonly raw: string;
  readonly output: string;
  readonly uuid: LayerUuid;
  readonly parentUuid: LayerUuid | null;
  readonly compression: Compression;
  readonly blockBytes: number;
  readonly userTag?: string | undefined;
  readonly signal: AbortSignal;
  readonly onProgress?: ((progress: Progress) => void) | undefined;
}

type CreateError = LayerReadError | LayerWriteError;

const ioError = (path: string, code: string, what: string): LayerReadError => ({
  kind: code === 'ENOENT' ? 'layer-missing' : 'layer-io',
  message: `${path} could not be ${what} (${code})`,
  path,
  code,
});

/** Runs of set bits as steps of rows, cut at STEP_BYTES and at the end of the file. */
function* extentSteps(bits: Uint8Array, sizeBytes: number): Generator<BigUint64Array> {
  const isSet = (page: number): boolean => (((bits[page >>> 3] ?? 0) >> (page & 7)) & 1) === 1;
  const pageEnd = Math.ceil(sizeBytes / PAGE_BYTES);
  let step: bigint[] = [];
  let used = 0;
  let page = 0;
  while (page < pageEnd) {
    if (bits[page >>> 3] === 0) {
      page = (page | 7) + 1; // eight clean pages
      continue;
    }
    if (!isSet(page)) {
      page += 1;
      continue;
    }
    let end = page + 1;
    const room = (STEP_BYTES - used) / PAGE_BYTES;
    while (end < pageEnd && end - page < room && isSet(end)) end += 1;
    const from = page * PAGE_BYTES;
    const length = Math.min(end * PAGE_BYTES, sizeBytes) - from;
    step.push(BigInt(from), BigInt(length), BigInt(used));
    used += (end - page) * PAGE_BYTES;
    page = end;
    if (used < STEP_BYTES && step.length < 3 * STEP_ROWS) continue;
    yield BigUint64Array.from(step);
    step = [];
    used = 0;
  }
  if (step.length > 0) yield BigUint64Array.from(step);
}

async function readExactly(
  file: FileHandle,
  path: string,
  slab: Uint8Array,
  rows: BigUint64Array,
): Promise<void> {
  for (let i = 0; i < rows.length; i += 3) {
    const [from, length, at] = [Number(rows[i]), Number(rows[i + 1]), Number(rows[i + 2])];
    let done = 0;
    while (done < length) {
      const { bytesRead } = await file.read(slab, at + done, length - done, from + done);
      if (bytesRead === 0) {
        const message = `${path} became shorter while it was read`;
        throw new Failure<LayerReadError>({ kind: 'layer-truncated', message, path });
      }
      done += bytesRead;
    }
  }
}

async function writeLayer(file: FileHandle, options: CreateOptions): Promise<SealedLayer> {
  const { raw, output, compression, blockBytes, signal } = options;
  const { size } = await file.stat();
  if (size % SECTOR_BYTES !== 0) {
    const message = `${raw} is ${size} bytes, not a whole number of ${SECTOR_BYTES}-byte sectors`;
    throw new Failure<LayerReadError>({ kind: 'layer-unsupported', message, path: raw });
  }
  const extents = fileExtents(file.fd, pagesCeil(bytes(size)));
  if (extents.error !== 0) throw new Failure(ioError(raw, `errno ${extents.error}`, 'mapped'));
  await using writer = await LayerWriter.create({
    path: output,
    uuid: options.uuid,
    parentUuid: options.parentUuid,
    virtualBytes: bytes(size),
    compression,
    blockBytes,
    userTag: options.userTag,
  });
  await pumpRows({
    writer,
    path: output,
    compression,
    blockBytes,
    steps: extentSteps(extents.bits, size),
    fill: (slab, rows) => readExactly(file, raw, slab, rows),
    onStep: (end) => options.onProgress?.({ doneBytes: bytes(end), totalBytes: bytes(size) }),
    signal,
  });
  return await writer.seal(signal);
}

/** Fails as reading the raw file and writing the layer do; then there is no output file. */
export async function createLayer(
  options: CreateOptions,
): Promise<Result<SealedLayer, CreateError>> {
  try {
    await using file = await open(options.raw, 'r');
    return ok(await writeLayer(file, options));
  } catch (error) {
    if (error instanceof Failure) return err((error as Failure<CreateError>).detail);
    const code = systemCode(error);
    if (code === undefined) throw error;
    return err(ioError(options.raw, code, 'read'));
  }
}
