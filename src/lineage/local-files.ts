import { unlink } from 'node:fs/promises';
import type { FailureDetail, Result } from '../result.ts';
import { err, ok, systemCode } from '../result.ts';
import type { LayerUuid } from '../units.ts';
import type { NodeDb } from './node-db.ts';

export interface DeletedLayers {
  /** Their files are gone. */
  readonly deleted: readonly LayerUuid[];
  /** Files that could not be removed; they stay condemned and are tried again next time. */
  readonly failed: readonly { readonly uuid: LayerUuid; readonly path: string; code: string }[];
}

/**
 * Deletes the files of local layers that no VM, lease or layer above needs. The order survives a crash
 * anywhere: condemned in node.db (no one can take the layer up any more), file removed, row forgotten;
 * what was condemned before and is still there is finished first. A file that cannot be removed keeps
 * its row, and with it the rows below; it keeps no other file.
 */
export async function deleteUnneededLayers(
  db: NodeDb,
): Promise<Result<DeletedLayers, FailureDetail>> {
  const condemned = db.condemnLayers();
  if (!condemned.ok) return err(condemned.error);
  const deleted: LayerUuid[] = [];
  const failed: { uuid: LayerUuid; path: string; code: string }[] = [];
  for (const { uuid, unlink: path } of condemned.value) {
    const code = path === null ? null : await remove(path);
    if (code === null) deleted.push(uuid);
    else failed.push({ uuid, path: path ?? '', code });
  }
  const forgotten = db.forgetLayers(deleted);
  return forgotten.ok ? ok({ deleted, failed }) : err(forgotten.error);
}

/** Null when the file is gone, else the error's name. */
async function remove(path: string): Promise<string | null> {
  try {
    await unlink(path);
    return null;
  } catch (error) {
    const code = systemCode(error) ?? String(error);
    return code === 'ENOENT' ? null : code;
  }
}
