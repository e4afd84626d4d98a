/**
 * Checks layers from end to end: structure, agreement of header and trailer, every CRC, the digest,
 * and each layer's place in the chain. Goes on after a finding, to list them all.
 */
import { nativeLayer } from '../native/layer.ts';
import { bytes, digest, MIB } from '../units.ts';
import type { Bytes, Digest } from '../units.ts';
import { readError } from './errors.ts';
import type { LayerReadError } from './errors.ts';
import { brokenLinks, LayerStack } from './layer-stack.ts';
import type { LayerFacts } from './layer-stack.ts';

export interface VerifyOptions {
  /** Bottom first. */
  readonly paths: readonly string[];
  /** What each file must hash to; null where it is not known. */
  readonly digests?: readonly (Digest | null)[] | undefined;
  /** The bottom may have a parent: the layers are the upper part of a chain. */
  readonly partial?: boolean | undefined;
  readonly signal: AbortSignal;
  readonly onProgress?: ((done: VerifyProgress) => void) | undefined;
}

export interface VerifyProgress {
  readonly path: string;
  readonly doneBytes: Bytes;
  readonly totalBytes: Bytes;
}

export interface VerifiedLayer {
  readonly path: string;
  /** Null where the structure could not be read. */
  readonly facts: LayerFacts | null;
  /** Of the file as it is; null where it could not be read or the check was cancelled. */
  readonly digest: Digest | null;
  readonly findings: readonly LayerReadError[];
}

export interface VerifyReport {
  readonly layers: readonly VerifiedLayer[];
  /** Broken uuid order. */
  readonly chain: readonly LayerReadError[];
  readonly sound: boolean;
}

const STEP = 4 * MIB;
const FINDINGS_MAX = 100;

const finding = (
  facts: LayerFacts,
  kind: LayerReadError['kind'],
  field: string,
  offset: number,
  what: string,
): LayerReadError => ({
  kind,
  message: `${facts.path}: ${field} at byte ${offset}: ${what}`,
  path: facts.path,
  field,
  offset,
});

/** What readers accept and writers never make, or what readers read differently. */
function structureFindings(facts: LayerFacts): LayerReadError[] {
  const { native } = facts;
  const trailerAt = native.contentBytes - 4096;
  const found: LayerReadError[] = [];
  const differs = (field: string, offset: number, header: unknown, trailer: unknown): void => {
    if (header === trailer) return;
    const what = `trailer says ${String(trailer)}, header ${String(header)}`;
    found.push(finding(facts, 'layer-corrupt', field, trailerAt + offset, what));
  };
  differs('trailer.uuid', 56, native.headerUuid, native.uuid);
  differs('trailer.parent_uuid', 93, native.headerParentUuid, native.parentUuid);
  differs('trailer.virtual_size', 48, native.headerVirtualBytes, native.virtualBytes);
  const committed = (native.headerFlags & 4) !== 0;
  if (committed && native.gapBytes !== 0) {
    const at = trailerAt - native.gapBytes;
    const what = `${native.gapBytes} bytes between index and trailer`;
    found.push(finding(facts, 'layer-trailing-bytes', 'index', at, what));
  }
  return found;
}

/** One layer, open on its own. */
class LayerCheck {
  readonly #stack: LayerStack;
  readonly #options: VerifyOptions;
  readonly #slab = new Uint8Array(STEP);
  readonly findings: LayerReadError[];
  readonly facts: LayerFacts;

  constructor(stack: LayerStack, facts: LayerFacts, options: VerifyOptions) {
    this.#stack = stack;
    this.#options = options;
    this.facts = facts;
    this.findings = structureFindings(facts);
  }

  async run(): Promise<Digest | null> {
    const reader = this.#stack.nativeReader();
    const trailer = reader.checkTrailer(0);
    if (trailer !== null) this.findings.push(readError(trailer, [this.facts.path]));
    if (this.facts.compression !== 'none') await this.#checkBlocks();
    return this.#hash();
  }

  /** Decompresses everything; where a step fails, block by block to name each bad one. */
  async #checkBlocks(): Promise<void> {
    const { contentBytes, blockBytes } = this.facts.native;
    for (let at = 0; at < contentBytes && !this.#stopped(); at += STEP) {
      const length = Math.min(STEP, contentBytes - at);
      if (await this.#reads(at, length)) continue;
      for (let block = at; block < at + length && !this.#stopped(); block += blockBytes) {
        await this.#reads(block, Math.min(blockBytes, contentBytes - block), true);
      }
    }
  }

  async #reads(offset: number, length: number, record = false): Promise<boolean> {
    const fault = await this.#stack.nativeReader().checkBlocks(this.#slab, 0, offset, length);
    if (fault !== null && record) this.findings.push(readError(fault, [this.facts.path]));
    return fault === null;
  }

  async #hash(): Promise<Digest | null> {
    const native = nativeLayer();
    const running = native.newDigest();
    const total = this.facts.sizeBytes;
    for (let at = 0; at < total; at += STEP) {
      if (this.#options.signal.aborted) return null;
      const length = Math.min(STEP, total - at);
      const reader = this.#stack.nativeReader();
      const fault = await reader.hashPart(this.#slab, running, 0, at, length);
      if (fault !== null) {
        this.findings.push(readError(fault, [this.facts.path]));
        return null;
      }
      const { path } = this.facts;
      this.#options.onProgress?.({ path, doneBytes: bytes(at + length), totalBytes: total });
    }
    return digest(`sha256:${native.finishDigest(running)}`);
  }

  #stopped(): boolean {
    return this.#options.signal.aborted || this.findings.length >= FINDINGS_MAX;
  }
}

async function verifyOne(
  path: string,
  expected: Digest | null,
  options: VerifyOptions,
): Promise<VerifiedLayer> {
  const opened = await LayerStack.open([path]);
  if (!opened.ok) return { path, facts: null, digest: null, findings: [opened.error] };
  await using stack = opened.value;
  const [facts] = stack.layers;
  if (facts === undefined) throw new Error('a stack of one path has one layer');
  const check = new LayerCheck(stack, facts, options);
  const found = await check.run();
  if (expected !== null && found !== null && found !== expected) {
    const what = `the file is ${found}, not ${expected}`;
    check.findings.push(finding(facts, 'layer-checksum', 'digest', 0, what));
  }
  if (options.signal.aborted) {
    const message = `checking ${path} was cancelled`;
    check.findings.push({ kind: 'layer-cancelled', message, path });
  }
  return { path, facts, digest: found, findings: check.findings };
}

/** Never fails: what is wrong is in the report. */
export async function verifyLayers(options: VerifyOptions): Promise<VerifyReport> {
  const layers: VerifiedLayer[] = [];
  for (const [position, path] of options.paths.entries()) {
    layers.push(await verifyOne(path, options.digests?.[position] ?? null, options));
  }
  const facts = layers.flatMap((layer) => layer.facts ?? []);
  const readable = facts.length === layers.length;
  const chain = readable ? brokenLinks(facts, options.partial ?? false) : [];
  const sound = chain.length === 0 && layers.every((layer) => layer.findings.length === 0);
  return { layers, chain, sound };
}
