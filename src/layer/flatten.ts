/**
 * Writes a stack's image as one sparse raw file: zero pages and holes take no space. Same promise
 * as for layers: a temporary name, fsync, no overwriting, fsync of the directory.
 */
import { randomBytes } from 'node:crypto';
import { link, open, unlink } from 'node:fs/promises';
import type { FileHandle } from 'node:fs/promises';
import { dirname } from 'node:path';
import type { NativeStackReader } from '../native/layer.ts';
import type { Result } from '../result.ts';
import { err, Failure, ok, systemCode } from '../result.ts';
import { bytes } from '../units.ts';
import type { Bytes } from '../units.ts';
import { readError, writeError } from './errors.ts';
import type { LayerReadError, LayerWriteError } from './errors.ts';
import type { LayerStack } from './layer-stack.ts';
import { PARTIAL_SUFFIX } from './layer-writer.ts';

export interface Progress {
  readonly doneBytes: Bytes;
  readonly totalBytes: Bytes;
}

export interface FlattenOptions {
  readonly path: string;
  readonly signal: AbortSignal;
  /** Default 0600: it is a guest's memory. */
  readonly mode?: number | undefined;
  /** Image bytes passed so far, holes included. */
  readonly onProgress?: ((progress: Progress) => void) | undefined;
}

/** Bytes per step; two steps run at a time. */
const STEP_BYTES = 4 * 1024 * 1024;
const ROWS_MAX = 4096;

export interface Flattened {
  readonly path: string;
  readonly imageBytes: Bytes;
  /** Data bytes read from layers. */
  readonly readBytes: Bytes;
}

type FlattenError = LayerReadError | LayerWriteError;

/** Walks the merged index in steps of rows; data rows take slab offsets from 0. */
export function* rowSteps(
  reader: NativeStackReader,
  stepBytes: number,
  o: {
    readonly withZeroed: boolean;
    /** Also rows past the stack's size, which a larger layer on top would uncover. */
    readonly pastEnd: boolean;
  },
): Generator<BigUint64Array> {
  let entry = 0;
  let sector = 0;
  for (;;) {
    const next = reader.nextRows(entry, sector, stepBytes, ROWS_MAX, o.withZeroed, o.pastEnd);
    if (next.rows.length === 0) return;
    yield next.rows;
    entry = next.entry;
    sector = next.sector;
  }
}

/** Data bytes and image end of a step. */
function measure(rows: BigUint64Array): { data: number; end: number } {
  let data = 0;
  let end = 0;
  for (let i = 0; i < rows.length; i += 3) {
    data += Number(rows[i + 1]);
    end = Math.max(end, Number(rows[i]) + Number(rows[i + 1]));
  }
  return { data, end };
}

const cancelled = (path: string): LayerReadError => ({
  kind: 'layer-cancelled',
  message: `writing ${path} was cancelled`,
  path,
});

/** Throws Failure of a read or write error. */
async function copyRows(
  stack: LayerStack,
  file: FileHandle,
  options: FlattenOptions,
): Promise<Bytes> {
  const reader = stack.nativeReader();
  const paths = stack.layers.map((layer) => layer.path);
  let readTotal = 0;
  const slabs = [new Uint8Array(STEP_BYTES), new Uint8Array(STEP_BYTES)];
  const running: Promise<void>[] = [Promise.resolve(), Promise.resolve()];
  let step = 0;
  try {
    for (const rows of rowSteps(reader, STEP_BYTES, { withZeroed: false, pastEnd: false })) {
      const turn = step % 2;
      await running[turn];
      if (options.signal.aborted) throw new Failure(cancelled(options.path));
      const slab = slabs[turn] ?? new Uint8Array(STEP_BYTES);
      const { data, end } = measure(rows);
      running[turn] = reader.writeFlat(slab, rows, file.fd).then((fault) => {
        if (fault === null) {
          options.onProgress?.({ doneBytes: bytes(end), totalBytes: stack.virtualBytes });
          return;
        }
        const isWrite = fault.field === 'write';
        throw new Failure<FlattenError>(
          isWrite ? writeError(fault, options.path) : readError(fault, paths),
        );
      });
      running[turn].catch(() => undefined); // awaited a turn later
      readTotal += data;
      step += 1;
    }
  } finally {
    await Promise.allSettled(running); // the slabs and the descriptor are theirs until then
  }
  await Promise.all(running);
  return bytes(readTotal);
}

export async function syncDirectory(path: string): Promise<void> {
  const directory = await open(path, 'r');
  try {
    await directory.sync();
  } finally {
    await directory.close();
  }
}

function ioFailure(error: unknown, path: string): FlattenError {
  if (error instanceof Failure) return error.detail as FlattenError;
  const code = systemCode(error);
  if (code === undefined) throw error;
  const kinds: Readonly<Record<string, LayerWriteError['kind']>> = {
    ENOSPC: 'layer-no-space',
    EEXIST: 'layer-exists',
    ENOENT: 'layer-missing',
  };
  const message = `${path} could not be written (${code})`;
  return { kind: kinds[code] ?? 'layer-io', message, path, code };
}

/** Fails on unreadable layers, a full disk, a name that is taken, cancellation; then no file. */
export async function flattenStack(
  stack: LayerStack,
  options: FlattenOptions,
): Promise<Result<Flattened, FlattenError>> {
  const { path } = options;
  const temp = `${path}.${randomBytes(6).toString('hex')}${PARTIAL_SUFFIX}`;
  let file: FileHandle | undefined;
  try {
    file = await open(temp, 'wx', 0o600);
    await file.truncate(stack.virtualBytes);
    const readBytes = await copyRows(stack, file, options);
    await file.chmod(options.mode ?? 0o600);
    await file.sync();
    await link(temp, path); // never overwrites
    await unlink(temp);
    await syncDirectory(dirname(path));
    return ok({ path, imageBytes: stack.virtualBytes, readBytes });
  } catch (error) {
    if (file !== undefined) await unlink(temp).catch(() => undefined);
    return err(ioFailure(error, path));
  } finally {
    await file?.close();
  }
}
