/** Nodes and their upload intents. */
import { newArtifact } from '../artifact/store.ts';
import type { StoredArtifact } from '../artifact/store.ts';
import type { ArtifactKey, NodeId } from '../units.ts';
import type { NewUpload, NodeRecord } from './catalog.ts';
import { refuse } from './check.ts';
import { chunks } from './database.ts';
import type { Transactions, Tx } from './database.ts';
import { findNode, insertNode, updateNodeAddress } from './node.queries.ts';
import { insertReclaims } from './reclaim.queries.ts';
import { insertUploads, selectUploads, takeUploads } from './upload.queries.ts';

/** The node stays what it is until this transaction ends. */
export async function requireNode(tx: Tx, id: NodeId): Promise<NodeRecord> {
  const node = await findNode(tx, id, 'shared');
  if (node === undefined) return refuse('node-unknown', id, `node ${id} is not registered`);
  if (node.forgottenAtMs !== null) refuseForgotten(id);
  return node;
}

const refuseForgotten = (id: NodeId): never =>
  refuse('node-forgotten', id, `node ${id} was forgotten: its id is spent, start it under another`);

export async function registerNode(
  tx: Tx,
  id: NodeId,
  address: string | null,
): Promise<NodeRecord> {
  const node = await findNode(tx, id, 'exclusive');
  if (node === undefined) {
    await insertNode(tx, id, address);
    return { id, address, registeredAtMs: tx.nowMs, forgottenAtMs: null };
  }
  if (node.forgottenAtMs !== null) refuseForgotten(id);
  if (node.address !== address) await updateNodeAddress(tx, id, address);
  return { ...node, address };
}

export async function recordUpload(
  tx: Tx,
  nodeId: NodeId,
  uploads: readonly NewUpload[],
): Promise<StoredArtifact[]> {
  await requireNode(tx, nodeId);
  const artifacts = uploads.map(({ kind, digest, sizeBytes }) =>
    newArtifact({ kind, digest, sizeBytes }),
  );
  await insertUploads(tx, nodeId, artifacts);
  return artifacts;
}

/** What the node will not publish goes to reclaim. What a publish takes first is the publish's. */
export async function abandonUploads(
  database: Transactions,
  nodeId: NodeId,
  keep: readonly ArtifactKey[],
): Promise<number> {
  const kept = new Set(keep);
  const uploads = await database.read('abandon-uploads', (tx) => selectUploads(tx, nodeId));
  const left = uploads.map(({ key }) => key).filter((key) => !kept.has(key));
  return await giveUpUploads(database, left);
}

/** Small transactions. Keys that are no uploads (any more) are left alone. */
export async function giveUpUploads(
  database: Transactions,
  keys: readonly ArtifactKey[],
): Promise<number> {
  let count = 0;
  for (const some of chunks(keys)) {
    count += await database.write('give-up-uploads', async (tx) => {
      const taken = await takeUploads(tx, some);
      await insertReclaims(tx, taken);
      return taken.length;
    });
  }
  return count;
}
