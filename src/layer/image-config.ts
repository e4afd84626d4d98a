/**
 * The image config that OverlayBD consumers open (`mem_image.json`). Source: FORMAT.md section 4.
 */
import { randomBytes } from 'node:crypto';
import { open, rename, stat, unlink } from 'node:fs/promises';
import { dirname, isAbsolute, resolve } from 'node:path';
import { z } from 'zod';
import type { Result } from '../result.ts';
import { err, Failure, ok, systemCode } from '../result.ts';
import type { Bytes, Digest, LayerUuid } from '../units.ts';
import { isDigest } from '../units.ts';
import type { LayerReadError, LayerWriteError } from './errors.ts';
import { syncDirectory } from './flatten.ts';
import { PARTIAL_SUFFIX } from './layer-writer.ts';

/** Layers that the reference's image config can list. */
export const LOWERS_MAX = 256;
/** Far above 256 lowers with the longest paths; more is not read. */
const CONFIG_BYTES_MAX = 4 * 1024 * 1024;

const lower = z
  .looseObject({
    file: z.string().min(1).optional(),
    dir: z.string().min(1).optional(),
    digest: z.string().refine(isDigest, 'must be sha256: and 64 hex digits').optional(),
    size: z.int().min(0).optional(),
    uuid: z.string().optional(),
  })
  .refine((l) => l.file !== undefined || (l.dir !== undefined && l.digest !== undefined), {
    error: 'must have `file`, or `dir` and `digest`',
  });

export const imageConfig = z.looseObject({
  repoBlobUrl: z.string().optional(),
  lowers: z.array(lower).max(LOWERS_MAX),
  upper: z.looseObject({}).optional(),
  resultFile: z.string().optional(),
});
export type ImageConfig = z.infer<typeof imageConfig>;

export interface ImageConfigLayer {
  readonly path: string;
  readonly digest: Digest;
  readonly sizeBytes: Bytes;
  readonly uuid: LayerUuid;
}

export interface ExportOptions {
  /** Bottom first. */
  readonly layers: readonly ImageConfigLayer[];
  /** The config file; replaced where it exists. */
  readonly path: string;
  readonly repoBlobUrl?: string | undefined;
}

async function writeDurably(path: string, text: string): Promise<void> {
  const temp = `${path}.${randomBytes(6).toString('hex')}${PARTIAL_SUFFIX}`;
  const file = await open(temp, 'wx', 0o644);
  try {
    await file.writeFile(text);
    await file.sync();
    await rename(temp, path);
    await syncDirectory(dirname(path));
  } catch (error) {
    await unlink(temp).catch(() => undefined);
    throw error;
  } finally {
    await file.close();
  }
}

/** Writes the config for a chain: atomic, durable. Fails on more than 256 layers and on I/O. */
export async function exportImageConfig(
  options: ExportOptions,
): Promise<Result<ImageConfig, LayerWriteError>> {
  const path = resolve(options.path);
  if (options.layers.length > LOWERS_MAX) {
    const message = `${path} cannot list ${options.layers.length} layers, only ${LOWERS_MAX}`;
    return err({ kind: 'layer-too-large', message, path });
  }
  const config: ImageConfig = {
    repoBlobUrl: options.repoBlobUrl ?? '',
    lowers: options.layers.map((layer) => ({
      // The reference resolves relative paths against its own working directory.
      file: resolve(layer.path),
      digest: layer.digest,
      size: layer.sizeBytes,
      uuid: layer.uuid,
    })),
    upper: {},
    resultFile: '',
  };
  try {
    await writeDurably(path, `${JSON.stringify(config, null, 2)}\n`);
    return ok(config);
  } catch (error) {
    const code = systemCode(error);
    if (code === undefined) throw error;
    const kind = code === 'ENOSPC' ? 'layer-no-space' : 'layer-io';
    return err({ kind, message: `${path} could not be written (${code})`, path, code });
  }
}

const bad = (path: string, message: string): LayerReadError => ({
  kind: 'layer-corrupt',
  message: `${path} is not an image config: ${message}`,
  path,
});

/** Checks a config's text. Never throws, whatever the text. */
export function parseImageConfig(text: string, path: string): Result<ImageConfig, LayerReadError> {
  let json: unknown;
  try {
    json = JSON.parse(text);
  } catch (error) {
    return err(bad(path, error instanceof Error ? error.message : 'not JSON'));
  }
  const parsed = imageConfig.safeParse(json);
  return parsed.success ? ok(parsed.data) : err(bad(path, z.prettifyError(parsed.error)));
}

/** Paths of a config's layers, bottom first. */
export function lowerPaths(config: ImageConfig, configPath: string): readonly string[] {
  const folder = dirname(resolve(configPath));
  return config.lowers.map((l) => {
    const path = l.file ?? `${l.dir ?? ''}/overlaybd.commit`;
    return isAbsolute(path) ? path : resolve(folder, path);
  });
}

async function readBounded(path: string): Promise<string> {
  const { size } = await stat(path);
  if (size > CONFIG_BYTES_MAX) throw new Failure(bad(path, `${size} bytes long`));
  await using file = await open(path, 'r');
  const buffer = Buffer.alloc(size);
  const { bytesRead } = await file.read(buffer, 0, size, 0);
  return buffer.toString('utf8', 0, bytesRead);
}

export async function readImageConfig(path: string): Promise<Result<ImageConfig, LayerReadError>> {
  try {
    return parseImageConfig(await readBounded(path), path);
  } catch (error) {
    if (error instanceof Failure) return err((error as Failure<LayerReadError>).detail);
    const code = systemCode(error);
    if (code === undefined) throw error;
    const kind = code === 'ENOENT' ? 'layer-missing' : 'layer-io';
    return err({ kind, message: `${path} could not be read (${code})`, path, code });
  }
}
