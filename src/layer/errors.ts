/** What can go wrong with layers, and how a native fault becomes a sentence. */
import { getSystemErrorName } from 'node:util';
import type { NativeFault } from '../native/layer.ts';

interface LayerFailure<Kind extends string> {
  readonly kind: Kind;
  readonly message: string;
  /** File it is about. */
  readonly path: string;
  /** Header field or area, such as `trailer.index_offset`. */
  readonly field?: string;
  /** Bytes, into the file, or into the content inside its ZFile for LSMT fields. */
  readonly offset?: number;
  /** `ENOSPC`, `EIO`, …: where the system failed. */
  readonly code?: string;
}

export type LayerReadErrorKind =
  /** No file of that name. */
  | 'layer-missing'
  /** The system could not read it. */
  | 'layer-io'
  /** No layer at all: another type of file. */
  | 'layer-not-a-layer'
  /** A writable layer that was never sealed. */
  | 'layer-unsealed'
  /** Its end is missing. */
  | 'layer-truncated'
  /** Bytes, or another layer, follow its end. */
  | 'layer-trailing-bytes'
  /** A field that cannot be. */
  | 'layer-corrupt'
  /** A CRC or a digest does not match. */
  | 'layer-checksum'
  /** A compression, block size or dictionary that no reader of ours takes. */
  | 'layer-unsupported'
  /** Beyond the format's or the reader's limits. */
  | 'layer-too-large'
  /** The stack was closed. */
  | 'layer-closed'
  /** A layer's parent is not the one below it. */
  | 'layer-chain-broken'
  | 'layer-cancelled';
export type LayerReadError = LayerFailure<LayerReadErrorKind>;

export type LayerWriteErrorKind =
  | 'layer-no-space'
  | 'layer-io'
  | 'layer-missing'
  /** Something has that name already. */
  | 'layer-exists'
  /** An earlier step failed or was cancelled: the file cannot be sealed any more. */
  | 'layer-poisoned'
  /** Two segments cover the same bytes. */
  | 'layer-overlap'
  /** More than SEGMENTS_MAX segments; join gaps or capture in two layers. */
  | 'layer-too-many-segments'
  /** Beyond a limit of the format. */
  | 'layer-too-large'
  | 'layer-cancelled';
export type LayerWriteError = LayerFailure<LayerWriteErrorKind>;

const codeOf = (errno: number): string | undefined =>
  errno === 0 ? undefined : getSystemErrorName(-errno);

const sentences: Readonly<Record<string, string>> = {
  'layer-missing': 'does not exist',
  'layer-io': 'could not be read or written',
  'layer-not-a-layer': 'is not an OverlayBD layer',
  'layer-unsealed': 'was never sealed',
  'layer-truncated': 'is truncated',
  'layer-trailing-bytes': 'has bytes after its end',
  'layer-corrupt': 'is corrupt',
  'layer-checksum': 'fails a checksum',
  'layer-unsupported': 'uses something unsupported',
  'layer-too-large': 'is beyond a limit',
  'layer-closed': 'was closed',
  'layer-no-space': 'does not fit: no space left',
  'layer-exists': 'exists already',
  'layer-overlap': 'got two segments for the same bytes',
  'layer-too-many-segments': 'got more segments than an index may have',
  'layer-cancelled': 'was cancelled',
};

function describeFault(fault: NativeFault, path: string): string {
  const code = codeOf(fault.errno);
  const value = fault.value === 0n ? '' : ` (found ${fault.value})`;
  const where = code === undefined ? ` at byte ${fault.offset}${value}` : ` (${code})`;
  return `${path} ${sentences[fault.kind] ?? fault.kind}: ${fault.field}${where}`;
}

function failure(fault: NativeFault, path: string): Omit<LayerFailure<string>, 'kind'> {
  const code = codeOf(fault.errno);
  return {
    message: describeFault(fault, path),
    path,
    field: fault.field,
    offset: fault.offset,
    ...(code === undefined ? {} : { code }),
  };
}

/** @param paths of the stack, bottom first: the fault says which one. */
export function readError(fault: NativeFault, paths: readonly string[]): LayerReadError {
  const path = paths[fault.layer] ?? paths[0] ?? '';
  return { kind: fault.kind as LayerReadErrorKind, ...failure(fault, path) };
}

export const writeError = (fault: NativeFault, path: string): LayerWriteError => ({
  kind: fault.kind as LayerWriteErrorKind,
  ...failure(fault, path),
});
