/** Ending what a dead node left behind. */
import type { NodeId } from '../units.ts';
import type { ForgottenNode } from './catalog.ts';
import { refuse } from './check.ts';
import { chunks } from './database.ts';
import type { Transactions } from './database.ts';
import { selectOpenHoldIdsOfNode } from './hold.queries.ts';
import { releaseHolds } from './holds.ts';
import { findNode, markNodeForgotten } from './node.queries.ts';
import { abandonUploads } from './nodes.ts';

/**
 * Small transactions; calling it again goes on where it stopped. The first one shuts the node out.
 */
export async function forgetNode(database: Transactions, id: NodeId): Promise<ForgottenNode> {
  const node = await database.write('forget-node', async (tx) => {
    const known = await findNode(tx, id, 'exclusive');
    if (known === undefined) return refuse('node-unknown', id, `node ${id} is not registered`);
    if (known.forgottenAtMs !== null) return known;
    await markNodeForgotten(tx, id);
    return { ...known, forgottenAtMs: tx.nowMs };
  });
  const holds = await database.read('forget-node-holds', (tx) => selectOpenHoldIdsOfNode(tx, id));
  for (const some of chunks(holds)) {
    await database.write('forget-node-holds', (tx) => releaseHolds(tx, some));
  }
  return {
    node,
    holdsReleased: holds.length,
    uploadsReclaimed: await abandonUploads(database, id, []),
  };
}
