/**
 * Writes one layer, append-only, and seals it. Bytes go from shared memory to the file on native
 * threads; the main thread handles rows only.
 *
 * States: open → (append)* → sealing → sealed; open or sealing → poisoned on any failure; any →
 * disposed.
 * I1 A file under the final name is whole, synced, mode 0444, and never replaced another file.
 * I2 After a failed or cancelled step nothing but disposal succeeds.
 * I3 Disposal without a seal leaves neither the final name nor the temporary one.
 * Tests: test/layer/writer.test.ts, one per invariant.
 */
import { randomBytes } from 'node:crypto';
import { nativeLayer } from '../native/layer.ts';
import type { NativeFault, NativeLayerSink } from '../native/layer.ts';
import { Failure } from '../result.ts';
import { bytes, digest, layerUuid } from '../units.ts';
import type { Bytes, Digest, LayerUuid } from '../units.ts';
import type { CompressedBatch } from './compress.ts';
import { writeError } from './errors.ts';
import type { LayerWriteError } from './errors.ts';
import { codecOf } from './format.ts';
import type { Compression } from './format.ts';

/**
 * Bytes of one batch and the image ranges they are. Rows of three: image offset, length, slab
 * offset or ZEROED_ROW; bytes, whole sectors (captures: whole pages). Batches may come in any order
 * but must not overlap, except with those from before a `supersede`.
 */
export interface SegmentBatch {
  readonly slab: Uint8Array;
  readonly rows: BigUint64Array;
  /** The rows' bytes as blocks; needed exactly when the layer is compressed. */
  readonly compressed?: CompressedBatch | undefined;
}

export interface LayerWriterOptions {
  /** Final name. The file has a temporary name beside it until it is sealed. */
  readonly path: string;
  readonly uuid: LayerUuid;
  readonly parentUuid: LayerUuid | null;
  /** Size of the image, whole sectors. */
  readonly virtualBytes: Bytes;
  readonly compression: Compression;
  /** Of the ZFile, one of `writtenBlockBytes`; unused with `none`. */
  readonly blockBytes: number;
  /** At most 255 bytes of text in the header. */
  readonly userTag?: string | undefined;
}

export interface SealedLayer {
  readonly path: string;
  readonly uuid: LayerUuid;
  readonly parentUuid: LayerUuid | null;
  /** sha256 of the whole file. */
  readonly digest: Digest;
  readonly sizeBytes: Bytes;
  /** Guest bytes stored, before compression. */
  readonly dataBytes: Bytes;
  /** Guest bytes in the file that nothing reads: what was appended after a `supersede` won. */
  readonly supersededBytes: Bytes;
  readonly virtualBytes: Bytes;
  readonly segmentCount: number;
  readonly zeroedBytes: Bytes;
}

/** How temporary names end: what a dead daemon left can be found and removed by it. */
export const PARTIAL_SUFFIX = '.partial';

type State = 'open' | 'sealing' | 'sealed' | 'poisoned' | 'disposed';

export class LayerWriter implements AsyncDisposable {
  readonly #sink: NativeLayerSink;
  readonly #options: LayerWriterOptions;
  #state: State = 'open';
  #poison: LayerWriteError | undefined;
  #writes: Promise<void> = Promise.resolve();
  #hashes: Promise<void> = Promise.resolve();

  private constructor(sink: NativeLayerSink, options: LayerWriterOptions) {
    this.#sink = sink;
    this.#options = options;
  }

  /** Throws `Failure<LayerWriteError>`: `layer-exists`, `layer-no-space`, `layer-io`. */
  static async create(options: LayerWriterOptions): Promise<LayerWriter> {
    const tempPath = `${options.path}.${randomBytes(6).toString('hex')}${PARTIAL_SUFFIX}`;
    const sink = new (nativeLayer().LayerSink)(
      options.path,
      tempPath,
      options.uuid,
      options.parentUuid ?? '',
      options.virtualBytes,
      codecOf[options.compression],
      options.blockBytes,
      options.userTag ?? '',
    );
    const fault = await sink.open();
    if (fault !== null) {
      await sink.abandon();
      throw new Failure(writeError(fault, options.path));
    }
    return new LayerWriter(sink, options);
  }

  /**
   * Stores a batch. Resolves once its bytes are with the kernel and hashed: the slab may be reused.
   * Calls are queued in order and need not be awaited one by one. Throws `Failure<LayerWriteError>`
   * and poisons the writer.
   */
  async append(batch: SegmentBatch): Promise<void> {
    this.#requireOpen('append');
    const { slab, rows, compressed } = batch;
    const keep = compressed === undefined ? slab : compressed.blocks;
    const staged =
      compressed === undefined
        ? this.#sink.stage(slab, rows)
        : this.#sink.stageBlocks(slab, rows, compressed.blocks, compressed.lengths);
    const written = this.#writes.then(async () => this.#step(() => this.#sink.write(staged, keep)));
    const hashed =
      compressed === undefined
        ? this.#hashes.then(async () => this.#step(() => this.#sink.hash(staged, keep)))
        : this.#hashes;
    this.#writes = written.catch(() => undefined);
    this.#hashes = hashed.catch(() => undefined);
    // Both must be over before the slab may be reused, also when one failed.
    const [write, hash] = await Promise.allSettled([written, hashed]);
    for (const outcome of [write, hash]) {
      if (outcome.status === 'rejected') throw outcome.reason;
    }
  }

  /**
   * What is appended from now on wins over what was appended before, where both name the same bytes
   * of the image. The bytes that lost stay in the file. Throws as `append`.
   */
  supersede(): void {
    this.#requireOpen('supersede');
    const fault = this.#sink.supersede();
    if (fault !== null) this.#fail(writeError(fault, this.#options.path));
  }

  /** Index, trailer, fsync, digest, final name, fsync of the directory. Once. */
  async seal(signal: AbortSignal): Promise<SealedLayer> {
    this.#requireOpen('seal');
    this.#state = 'sealing';
    await Promise.all([this.#writes, this.#hashes]);
    await this.#sealStep(signal, () => this.#sink.finish());
    // A compressed file can be hashed only now, since its header is written last: beside the fsync.
    const outcomes = await Promise.all([this.#sink.hashFile(), this.#sink.sync()]);
    for (const outcome of outcomes) {
      await this.#sealStep(signal, () => Promise.resolve(outcome));
    }
    await this.#sealStep(signal, () => this.#sink.publish());
    this.#state = 'sealed';
    const totals = this.#sink.totals();
    const { path, uuid, parentUuid, virtualBytes } = this.#options;
    return {
      path,
      uuid: layerUuid(uuid),
      parentUuid,
      digest: digest(`sha256:${totals.digest}`),
      sizeBytes: bytes(totals.fileBytes),
      dataBytes: bytes(totals.dataBytes),
      supersededBytes: bytes(totals.supersededBytes),
      virtualBytes,
      segmentCount: totals.segments,
      zeroedBytes: bytes(totals.zeroedBytes),
    };
  }

  /** Gives up what is not sealed: waits for running steps, then unlinks. Idempotent. */
  async [Symbol.asyncDispose](): Promise<void> {
    if (this.#state === 'disposed' || this.#state === 'sealed') return;
    this.#state = 'disposed';
    await Promise.all([this.#writes, this.#hashes]);
    await this.#sink.abandon();
  }

  async #sealStep(signal: AbortSignal, step: () => Promise<NativeFault | null>): Promise<void> {
    if (signal.aborted) {
      this.#fail({
        kind: 'layer-cancelled',
        message: `sealing ${this.#options.path} was cancelled`,
        path: this.#options.path,
      });
    }
    await this.#step(step);
  }

  async #step(run: () => Promise<NativeFault | null>): Promise<void> {
    if (this.#poison !== undefined) throw new Failure(this.#poisoned(this.#poison));
    const fault = await run();
    if (fault !== null) this.#fail(writeError(fault, this.#options.path));
  }

  #fail(error: LayerWriteError): never {
    this.#poison ??= error;
    if (this.#state !== 'disposed') this.#state = 'poisoned';
    throw new Failure(error);
  }

  #poisoned(cause: LayerWriteError): LayerWriteError {
    return {
      kind: 'layer-poisoned',
      message: `${this.#options.path} cannot be written any more: ${cause.message}`,
      path: this.#options.path,
    };
  }

  #requireOpen(what: string): void {
    if (this.#poison !== undefined) throw new Failure(this.#poisoned(this.#poison));
    if (this.#state !== 'open') throw new Error(`${what} on a layer writer that is ${this.#state}`);
  }
}
