/**
 * What OverlayBD consumers open beside our own files (ADR 0042): `mem_image.json`, which names the
 * memory's layers as files of this node, and `firecracker-manifest.json`, which says how large it is.
 */
import { writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import type { ArtifactStore } from '../artifact/store.ts';
import type { Layer } from '../catalog/catalog.ts';
import type { LayerWriteError } from '../layer/errors.ts';
import { exportImageConfig } from '../layer/image-config.ts';
import { ok, type Result } from '../result.ts';

export const overlaybdFiles = ['mem_image.json', 'firecracker-manifest.json'] as const;

/**
 * Writes both into `folder`, where every layer is a file of this node; else neither, since a path
 * is what they consist of. `true`: written.
 * @param chain bottom to top
 * @param made told of each file that it has made
 */
export async function exportOverlaybd(
  store: Pick<ArtifactStore, 'localPath'>,
  chain: readonly Layer[],
  folder: string,
  made: (path: string) => void,
): Promise<Result<boolean, LayerWriteError>> {
  const layers = [];
  for (const { uuid, artifact } of chain) {
    const path = store.localPath(artifact.key);
    if (path === null) return ok(false);
    layers.push({ path, digest: artifact.digest, sizeBytes: artifact.sizeBytes, uuid });
  }
  const [image, manifest] = overlaybdFiles;
  const written = await exportImageConfig({ layers, path: join(folder, image) });
  if (!written.ok) return written;
  made(join(folder, image));
  const virtualSize = chain.at(-1)?.virtualBytes ?? 0;
  const text = { version: 1, vmState: {}, memory: { virtualSize }, attachedDrives: [] };
  const path = join(folder, manifest);
  await writeFile(path, `${JSON.stringify(text, null, 2)}\n`, { flag: 'wx' });
  made(path);
  return ok(true);
}
