/**
 * `varve layer …`: tools on layer files, bottom layer first. No daemon is needed. Each takes
 * `--json`. Exit status: as
 * for all commands; `verify` ends with 1 where it finds something.
 */
import { randomUUID } from 'node:crypto';
import { Command, InvalidArgumentError, Option } from 'commander';
import { createLayer } from '../layer/create.ts';
import { flattenStack } from '../layer/flatten.ts';
import { compressions, DEFAULT_BLOCK_BYTES, writtenBlockBytes } from '../layer/format.ts';
import type { Compression } from '../layer/format.ts';
import { exportImageConfig } from '../layer/image-config.ts';
import { LayerStack, uuidOrNull } from '../layer/layer-stack.ts';
import type { LayerFacts } from '../layer/layer-stack.ts';
import { mergeLayers } from '../layer/merge.ts';
import { verifyLayers } from '../layer/verify.ts';
import type { VerifiedLayer, VerifyReport } from '../layer/verify.ts';
import { Failure } from '../result.ts';
import type { FailureDetail, Result } from '../result.ts';
import { layerUuid, MIB } from '../units.ts';
import type { LayerUuid } from '../units.ts';

/** Where output goes and what interrupts; a parameter, so that tests can listen. */
export interface LayerCommandIo {
  readonly out: (text: string) => void;
  readonly err: (text: string) => void;
  /** Standard error is a terminal: progress bars are shown. */
  readonly interactive: boolean;
  readonly signal: AbortSignal;
  readonly setExitCode: (code: number) => void;
}

/** Standard streams; the first interrupt cancels cleanly. */
export function processIo(): LayerCommandIo {
  const controller = new AbortController();
  for (const name of ['SIGINT', 'SIGTERM', 'SIGHUP'] as const) {
    process.once(name, () => {
      controller.abort();
    });
  }
  return {
    out: (text) => process.stdout.write(text),
    err: (text) => process.stderr.write(text),
    interactive: process.stderr.isTTY,
    signal: controller.signal,
    setExitCode: (code) => {
      process.exitCode = code;
    },
  };
}

const PROGRESS_MS = 200;
const BAR_CELLS = 30;

/** A bar on standard error, redrawn five times a second at most. */
function progressBar(io: LayerCommandIo, label: string) {
  let drawnMs = 0;
  return {
    update: (progress: { readonly doneBytes: number; readonly totalBytes: number }): void => {
      const nowMs = performance.now();
      if (!io.interactive || nowMs - drawnMs < PROGRESS_MS) return;
      drawnMs = nowMs;
      const share = Math.min(1, progress.doneBytes / Math.max(1, progress.totalBytes));
      const bar = '#'.repeat(Math.round(share * BAR_CELLS)).padEnd(BAR_CELLS, '.');
      const mib = Math.round(progress.doneBytes / MIB);
      io.err(`\r${label} [${bar}] ${Math.round(share * 100)}% ${mib} MiB`);
    },
    [Symbol.dispose]: (): void => {
      if (io.interactive && drawnMs > 0) io.err('\r\x1b[K');
    },
  };
}

interface JsonFlag {
  readonly json?: boolean;
}

function print(io: LayerCommandIo, flags: JsonFlag, value: unknown, forPeople: () => string): void {
  io.out(flags.json === true ? `${JSON.stringify(value, null, 2)}\n` : forPeople());
}

function orThrow<T>(result: Result<T, FailureDetail>): T {
  if (!result.ok) throw new Failure(result.error);
  return result.value;
}

function uuidArgument(text: string): LayerUuid {
  if (!/^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$/i.test(text)) {
    throw new InvalidArgumentError('must be a UUID.');
  }
  return layerUuid(text);
}

function blockSizeArgument(text: string): number {
  const match = /^(\d+)(KiB)?$/.exec(text);
  const size = Number(match?.[1]) * (match?.[2] === undefined ? 1 : 1024);
  if (!writtenBlockBytes.some((allowed) => allowed === size)) {
    throw new InvalidArgumentError(`must be one of ${writtenBlockBytes.join(', ')} bytes.`);
  }
  return size;
}

const compressionOption = (): Option =>
  new Option('--compression <kind>', 'how blocks are compressed')
    .choices(compressions)
    .default('none');

const blockSizeOption = (): Option =>
  new Option('--block-size <bytes>', 'content bytes in a compressed block')
    .argParser(blockSizeArgument)
    .default(DEFAULT_BLOCK_BYTES);

const factsJson = (facts: LayerFacts): Record<string, unknown> => {
  const { native, ...own } = facts;
  return {
    ...own,
    blockBytes: native.blockBytes === 0 ? null : native.blockBytes,
    blockCrc: native.codec === 0 ? null : native.verify,
    tar: native.tar,
    headerFlags: native.headerFlags,
    trailerFlags: native.trailerFlags,
    indexOffset: native.indexOffset,
    indexEntries: native.indexEntries,
    userTag: native.userTag,
  };
};

function describeFacts(facts: LayerFacts): string {
  const { native } = facts;
  const crcs = native.verify ? ' with CRCs' : '';
  const blocks =
    facts.compression === 'none'
      ? 'none'
      : `${facts.compression}, ${native.blockBytes}-byte blocks${crcs}`;
  const kind = [
    (native.headerFlags & 4) === 0 ? 'sealed in place' : 'committed',
    ...((native.headerFlags & 16) === 0 ? [] : ['sparse']),
    ...(native.tar ? ['in tar'] : []),
  ];
  const lines = [
    ['uuid', uuidOrNull(facts.uuid) ?? 'none'],
    ['parent', facts.parentUuid ?? 'none'],
    ['kind', kind.join(', ')],
    ['compression', blocks],
    ['file', `${facts.sizeBytes} bytes`],
    ['image', `${facts.virtualBytes} bytes`],
    ['data', `${facts.dataBytes} bytes in ${facts.segmentCount} segments`],
    ['zeroed', `${facts.zeroedBytes} bytes`],
    ...(native.userTag === '' ? [] : [['user tag', native.userTag]]),
  ];
  const body = lines.map(([name, text]) => `  ${(name ?? '').padEnd(12)}${text ?? ''}\n`).join('');
  return `${facts.path}\n${body}`;
}

async function inspect(io: LayerCommandIo, paths: string[], flags: JsonFlag): Promise<void> {
  const all: LayerFacts[] = [];
  for (const path of paths) {
    await using stack = orThrow(await LayerStack.open([path]));
    all.push(...stack.layers);
  }
  print(io, flags, { layers: all.map(factsJson) }, () => all.map(describeFacts).join(''));
}

function describeReport(report: VerifyReport): string {
  const layerLine = (layer: VerifiedLayer): string => {
    const verdict = layer.findings.length === 0 ? 'sound' : `${layer.findings.length} findings`;
    const details = layer.findings.map((f) => `    ${f.message} [${f.kind}]\n`).join('');
    return `${layer.path}: ${verdict}  ${layer.digest ?? ''}\n${details}`;
  };
  const chain = report.chain.map((f) => `chain: ${f.message} [${f.kind}]\n`).join('');
  return report.layers.map(layerLine).join('') + chain;
}

async function verify(
  io: LayerCommandIo,
  paths: string[],
  flags: JsonFlag & { readonly partial?: boolean },
): Promise<void> {
  using bar = progressBar(io, 'verify');
  const { partial } = flags;
  const report = await verifyLayers({ paths, partial, signal: io.signal, onProgress: bar.update });
  const layers = report.layers.map((layer) => ({
    ...layer,
    facts: layer.facts === null ? null : factsJson(layer.facts),
  }));
  print(io, flags, { ...report, layers }, () => describeReport(report));
  if (!report.sound) io.setExitCode(1);
}

interface ExportFlags extends JsonFlag {
  readonly output?: string;
  readonly imageConfig?: string;
}

async function exportFlat(
  io: LayerCommandIo,
  paths: string[],
  output: string,
  flags: JsonFlag,
): Promise<void> {
  await using stack = orThrow(await LayerStack.open(paths));
  using bar = progressBar(io, 'export');
  const options = { path: output, signal: io.signal, onProgress: bar.update };
  const done = orThrow(await flattenStack(stack, options));
  const text = `${done.path}: ${done.imageBytes} bytes, ${done.readBytes} of them data\n`;
  print(io, flags, done, () => text);
}

async function exportConfig(
  io: LayerCommandIo,
  paths: string[],
  config: string,
  flags: JsonFlag,
): Promise<void> {
  using bar = progressBar(io, 'digest');
  const report = await verifyLayers({ paths, signal: io.signal, onProgress: bar.update });
  const [finding] = report.layers.flatMap((layer) => layer.findings).concat(report.chain);
  if (finding !== undefined) throw new Failure(finding);
  const layers = report.layers.flatMap(({ facts, digest }) =>
    facts === null || digest === null
      ? []
      : [{ path: facts.path, digest, sizeBytes: facts.sizeBytes, uuid: facts.uuid }],
  );
  const done = orThrow(await exportImageConfig({ layers, path: config }));
  const text = `${config}: ${done.lowers.length} layers\n`;
  print(io, flags, { path: config, config: done }, () => text);
}

async function exportLayers(
  io: LayerCommandIo,
  paths: string[],
  flags: ExportFlags,
  command: Command,
): Promise<void> {
  const { output, imageConfig } = flags;
  if ((output === undefined) === (imageConfig === undefined)) {
    command.error('error: give --output FLAT or --image-config FILE', { exitCode: 2 });
  }
  if (output !== undefined) await exportFlat(io, paths, output, flags);
  if (imageConfig !== undefined) await exportConfig(io, paths, imageConfig, flags);
}

interface MergeFlags extends JsonFlag {
  readonly output: string;
  readonly compression: Compression;
  readonly blockSize: number;
  readonly uuid?: LayerUuid;
  readonly below?: string[];
  readonly anyOrder?: boolean;
}

async function merge(io: LayerCommandIo, paths: string[], flags: MergeFlags): Promise<void> {
  using bar = progressBar(io, 'merge');
  const merged = await mergeLayers({
    paths,
    output: flags.output,
    uuid: flags.uuid ?? layerUuid(randomUUID()),
    below: flags.below,
    order: flags.anyOrder === true ? 'ignore' : 'check',
    compression: flags.compression,
    blockBytes: flags.blockSize,
    signal: io.signal,
    onProgress: bar.update,
  });
  const done = orThrow(merged);
  print(io, flags, done, () => {
    const { sealed, readBytes, writtenBytes } = done;
    const first = `${sealed.path}: uuid ${sealed.uuid}, ${sealed.segmentCount} segments\n`;
    return `${first}  read ${readBytes} bytes, wrote ${writtenBytes}  ${sealed.digest}\n`;
  });
}

interface CreateFlags extends JsonFlag {
  readonly output: string;
  readonly compression: Compression;
  readonly blockSize: number;
  readonly parent?: string;
  readonly uuid?: LayerUuid;
}

async function uuidOf(path: string): Promise<LayerUuid | null> {
  await using stack = orThrow(await LayerStack.open([path]));
  const [layer] = stack.layers;
  return layer === undefined ? null : uuidOrNull(layer.uuid);
}

async function create(io: LayerCommandIo, raw: string, flags: CreateFlags): Promise<void> {
  const parentUuid = flags.parent === undefined ? null : await uuidOf(flags.parent);
  using bar = progressBar(io, 'create');
  const created = await createLayer({
    raw,
    output: flags.output,
    uuid: flags.uuid ?? layerUuid(randomUUID()),
    parentUuid,
    compression: flags.compression,
    blockBytes: flags.blockSize,
    signal: io.signal,
    onProgress: bar.update,
  });
  const done = orThrow(created);
  print(io, flags, done, () => {
    const first = `${done.path}: uuid ${done.uuid}, ${done.dataBytes} bytes of data\n`;
    return `${first}  ${done.sizeBytes} bytes  ${done.digest}\n`;
  });
}

/** The sub-command, to be mounted by `varve`. Failures are thrown as `Failure`. */
export function layerCommand(makeIo: () => LayerCommandIo = processIo): Command {
  const layer = new Command('layer')
    .description('inspect, check and convert OverlayBD layers')
    .exitOverride();
  const json = (): Option => new Option('--json', 'print JSON');
  layer
    .command('inspect')
    .description('show what the headers of layers say')
    .argument('<layer...>')
    .addOption(json())
    .action((paths: string[], _own: unknown, command: Command) =>
      inspect(makeIo(), paths, command.optsWithGlobals()),
    );
  layer
    .command('verify')
    .description('check structure, checksums and chain of layers')
    .argument('<layer...>', 'bottom first')
    .option('--partial', 'the bottom layer may have a parent that is not given')
    .addOption(json())
    .action((paths: string[], _own: unknown, command: Command) =>
      verify(makeIo(), paths, command.optsWithGlobals()),
    );
  layer
    .command('export')
    .description('write the image of layers as a sparse file, or as an image config')
    .argument('<layer...>', 'bottom first')
    .option('--output <flat>', 'sparse raw file to write; must not exist')
    .option('--image-config <file>', 'OverlayBD image config to write')
    .addOption(json())
    .action((paths: string[], _own: unknown, command: Command) =>
      exportLayers(makeIo(), paths, command.optsWithGlobals(), command),
    );
  addWriters(layer, makeIo);
  return layer;
}

function addWriters(layer: Command, makeIo: () => LayerCommandIo): void {
  const uuid = (): Option =>
    new Option('--uuid <uuid>', 'of the new layer').argParser(uuidArgument);
  layer
    .command('merge')
    .description('merge layers into one')
    .argument('<layer...>', 'bottom first')
    .requiredOption('--output <layer>', 'layer to write; must not exist')
    .addOption(compressionOption())
    .addOption(blockSizeOption())
    .addOption(uuid())
    .option('--below <layer...>', 'the layers below, to keep only zeroes that hide data of theirs')
    .option('--any-order', "merge layers also where one's parent is not the one below it")
    .option('--json', 'print JSON')
    .action((paths: string[], _own: unknown, command: Command) =>
      merge(makeIo(), paths, command.optsWithGlobals()),
    );
  layer
    .command('create')
    .description('make a layer of a sparse raw file')
    .argument('<raw>')
    .requiredOption('--output <layer>', 'layer to write; must not exist')
    .addOption(compressionOption())
    .addOption(blockSizeOption())
    .option('--parent <layer>', 'layer that the new one sits on')
    .addOption(uuid())
    .option('--json', 'print JSON')
    .action((raw: string, _own: unknown, command: Command) =>
      create(makeIo(), raw, command.optsWithGlobals()),
    );
}
