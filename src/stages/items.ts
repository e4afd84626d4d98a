/** What flows between the stages: descriptors only. Guest bytes stay in slabs. */
import type { SegmentBatch } from '../layer/layer-writer.ts';
import type { MemoryLayout, PageBitmap } from '../memory.ts';
import type { Slab } from '../pipeline/slabs.ts';
import type { CaptureId, LayerUuid } from '../units.ts';
import type { SealedLayer } from '../layer/layer-writer.ts';

export interface CaptureStart {
  readonly captureId: CaptureId;
}

export interface PausedVm {
  readonly captureId: CaptureId;
  /** False where the owner had paused the VM before. */
  readonly pausedByUs: boolean;
}

export type ByteSource =
  | { readonly kind: 'process'; readonly pid: number }
  /** A sparse memory file that the VMM wrote, offsets as in the image. */
  | { readonly kind: 'file'; readonly path: string };

export interface SelectedSet {
  readonly layout: MemoryLayout;
  /** Pages to read. */
  readonly selected: PageBitmap;
  /** Pages known to read zero now, without reading them; disjoint from `selected`. */
  readonly zero: PageBitmap | null;
  readonly source: ByteSource;
  readonly vmStatePath: string | null;
  /**
   * How many sets of this capture came before: rounds of pre-copy. A page may be in several; the
   * last one wins.
   */
  readonly round: number;
  /** False while the VM runs: then no page is read along that the sets do not name. */
  readonly frozen: boolean;
  /** No dirty set names these pages: they are compared with the memory parent, to verify that. */
  readonly unnamed?: boolean;
}

/** Pages that read zero: nothing is read for them. */
export interface ZeroBatch {
  readonly kind: 'zeros';
  /** Rows of 3: 0, image offset, length; bytes. */
  readonly rows: BigUint64Array;
  readonly bytes: number;
  /** As in `SelectedSet`. */
  readonly round: number;
}

export type RangeBatch =
  | {
      readonly kind: 'ranges';
      /** Rows of 3: host address, image offset, length; bytes. */
      readonly rows: BigUint64Array;
      readonly bytes: number;
      readonly source: ByteSource;
      /** As in `SelectedSet`. */
      readonly round: number;
      /** As in `SelectedSet`. */
      readonly unnamed: boolean;
    }
  | ZeroBatch;

export type PageBatch =
  | {
      readonly kind: 'pages';
      readonly slab: Slab;
      /**
       * Rows of 3: image offset, length, offset in the slab; bytes. The slab's bytes are packed in
       * row order.
       */
      readonly rows: BigUint64Array;
      readonly bytes: number;
      readonly round: number;
      /** As in `SelectedSet`. */
      readonly unnamed: boolean;
    }
  | ZeroBatch;

export interface Segments {
  readonly batch: SegmentBatch;
  /** Given back once the bytes are in the file. */
  readonly slabs: readonly Slab[];
  readonly round: number;
  /** Bytes that went in, before zero pages and equal pages were dropped. */
  readonly bytes: number;
}

export interface CommittedLayer {
  readonly sealed: SealedLayer;
  readonly predecessor: LayerUuid | null;
}
