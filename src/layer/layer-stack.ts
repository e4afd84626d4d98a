/**
 * Opens layers as one image: upper layers win, zeroed segments read as zero, holes show what is
 * below. A stack keeps the files it opened: replacing one on disk changes nothing for it.
 */
import { randomUUID } from 'node:crypto';
import { nativeLayer } from '../native/layer.ts';
import type { NativeLayerFacts, NativeStackReader } from '../native/layer.ts';
import type { Result } from '../result.ts';
import { err, ok } from '../result.ts';
import { bytes, layerUuid } from '../units.ts';
import type { Bytes, LayerUuid } from '../units.ts';
import { readError } from './errors.ts';
import type { LayerReadError } from './errors.ts';
import { compressionOf, NIL_UUID } from './format.ts';
import type { Compression } from './format.ts';
import { BLOCK_CACHE_BYTES, forgetReader } from './shared-stack.ts';
import type { SharedStack } from './shared-stack.ts';

/** What one layer's headers say. Sizes in bytes. */
export interface LayerFacts {
  readonly path: string;
  readonly uuid: LayerUuid;
  readonly parentUuid: LayerUuid | null;
  readonly compression: Compression;
  /** Size of the file. */
  readonly sizeBytes: Bytes;
  readonly virtualBytes: Bytes;
  readonly dataBytes: Bytes;
  readonly zeroedBytes: Bytes;
  readonly segmentCount: number;
  readonly native: NativeLayerFacts;
}

export interface OpenOptions {
  /**
   * Whether each layer's parent must be the one below it, and the bottom's none: the reference
   * never checks. With `check` a broken order is `layer-chain-broken`. A bottom with a parent is
   * fine where `partial` is set: the stack is the upper part of a chain.
   */
  readonly order?: 'ignore' | 'check' | undefined;
  readonly partial?: boolean | undefined;
}

/** All zero means none: so the reference writes a layer that was not given one. */
export const uuidOrNull = (uuid: string): LayerUuid | null =>
  uuid === NIL_UUID ? null : layerUuid(uuid);

const toFacts = (native: NativeLayerFacts, path: string): LayerFacts => ({
  path,
  uuid: layerUuid(native.uuid),
  parentUuid: uuidOrNull(native.parentUuid),
  compression: compressionOf(native.codec),
  sizeBytes: bytes(native.fileBytes),
  virtualBytes: bytes(native.virtualBytes),
  dataBytes: bytes(native.dataBytes),
  zeroedBytes: bytes(native.zeroedBytes),
  segmentCount: native.segments,
  native,
});

/** Every place where the uuid order is broken, bottom first. */
export function brokenLinks(layers: readonly LayerFacts[], partial: boolean): LayerReadError[] {
  return layers.flatMap((layer, position) => {
    const below = layers[position - 1];
    // On a layer without a UUID sits one that names none.
    const expected = below === undefined ? null : uuidOrNull(below.uuid);
    if (layer.parentUuid === expected || (below === undefined && partial)) return [];
    const wanted = expected ?? 'none';
    return [
      {
        kind: 'layer-chain-broken',
        message: `${layer.path} has parent ${layer.parentUuid ?? 'none'}, below it is ${wanted}`,
        path: layer.path,
        field: 'parent_uuid',
      } satisfies LayerReadError,
    ];
  });
}

export class LayerStack implements AsyncDisposable {
  /** Bottom first. */
  readonly layers: readonly LayerFacts[];
  /** Size of the image: that of the topmost layer that has one. */
  readonly virtualBytes: Bytes;
  /** Segments of the merged index. */
  readonly segmentCount: number;
  readonly #reader: NativeStackReader;
  readonly #shared: SharedStack;
  readonly #paths: readonly string[];

  private constructor(
    layers: readonly LayerFacts[],
    segmentCount: number,
    reader: NativeStackReader,
    shared: SharedStack,
  ) {
    this.layers = layers;
    this.virtualBytes = shared.virtualBytes;
    this.segmentCount = segmentCount;
    this.#reader = reader;
    this.#shared = shared;
    this.#paths = shared.paths;
  }

  /** Opens 1 to 255 layers, bottom first; checks headers, indexes and jump tables, not the data. */
  static async open(
    pathsBottomToTop: readonly string[],
    options: OpenOptions = {},
  ): Promise<Result<LayerStack, LayerReadError>> {
    const native = nativeLayer();
    const opened = await native.openStack(pathsBottomToTop);
    if (opened.fault !== null) return err(readError(opened.fault, pathsBottomToTop));
    const pack = new SharedArrayBuffer(opened.packBytes);
    const view = new Uint8Array(pack);
    await native.fillPack(opened.stack, view);
    const reader = new native.StackReader(view, BLOCK_CACHE_BYTES);
    const layers = opened.layers.map((facts, i) => toFacts(facts, pathsBottomToTop[i] ?? ''));
    const shared: SharedStack = {
      id: randomUUID(),
      pack,
      paths: [...pathsBottomToTop],
      virtualBytes: bytes(opened.virtualBytes),
    };
    const [broken] = brokenLinks(layers, options.partial ?? false);
    if (options.order === 'check' && broken !== undefined) {
      reader.close();
      return err(broken);
    }
    return ok(new LayerStack(layers, opened.entries, reader, shared));
  }

  /** Reads image bytes off the main thread. Any range within 2^53; zero past the end. */
  async read(offset: Bytes, into: Uint8Array): Promise<Result<void, LayerReadError>> {
    const fault = await this.#reader.read(into, offset);
    return fault === null ? ok(undefined) : err(readError(fault, this.#paths));
  }

  /** Reads each data row's image range to its slab offset, off the main thread. */
  async readRows(slab: Uint8Array, rows: BigUint64Array): Promise<Result<void, LayerReadError>> {
    const fault = await this.#reader.readRows(slab, rows);
    return fault === null ? ok(undefined) : err(readError(fault, this.#paths));
  }

  /** For the walks of this room: flatten, merge, verify. */
  nativeReader(): NativeStackReader {
    return this.#reader;
  }

  /** A view for workers; see SharedStack. */
  shared(): SharedStack {
    return this.#shared;
  }

  /** Refuses new reads; descriptors close once running ones are over. Idempotent. */
  [Symbol.asyncDispose](): Promise<void> {
    this.#reader.close();
    forgetReader(this.#shared);
    return Promise.resolve();
  }
}
