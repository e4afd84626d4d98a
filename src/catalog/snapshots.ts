/** Finding snapshots: by id or alias, in pages, with what they need. */
import { Failure } from '../result.ts';
import type { LayerUuid, SnapshotId } from '../units.ts';
import { findAlias, insertAlias } from './alias.queries.ts';
import type { Layer, ListRequest, ResolvedSnapshot, Snapshot, SnapshotPage } from './catalog.ts';
import { isName, quote, refuse } from './check.ts';
import { findContent } from './content.queries.ts';
import type { Tx } from './database.ts';
import type { CatalogError } from './errors.ts';
import { selectChain } from './layer.queries.ts';
import { findSnapshot, markInvalid, selectSnapshots } from './snapshot.queries.ts';

const LIMIT_DEFAULT = 100;

/** Refuses a name that means, or is, another snapshot. */
export async function requireFreeAlias(
  tx: Tx,
  alias: string,
  owner: string | undefined,
): Promise<void> {
  if (owner !== undefined) refuse('alias-taken', alias, `alias ${alias} names ${owner}, for good`);
  if ((await findSnapshot(tx, alias as SnapshotId)) !== undefined) {
    refuse('alias-taken', alias, `${alias} is the id of a snapshot`);
  }
}

/** Ids win over aliases. Text that can be neither is simply not found. */
export async function findSnapshotBy(tx: Tx, idOrAlias: string): Promise<Snapshot | undefined> {
  if (!isName(idOrAlias)) return undefined;
  const byId = await findSnapshot(tx, idOrAlias as SnapshotId);
  if (byId !== undefined) return byId;
  const named = await findAlias(tx, idOrAlias);
  return named === undefined ? undefined : await findSnapshot(tx, named);
}

export async function requireSnapshot(tx: Tx, idOrAlias: string): Promise<Snapshot> {
  return (
    (await findSnapshotBy(tx, idOrAlias)) ??
    refuse('snapshot-missing', idOrAlias.slice(0, 200), `there is no snapshot ${quote(idOrAlias)}`)
  );
}

export function requireUsable(
  snapshot: Snapshot | undefined,
  idOrAlias: string,
  o: { readonly allowSuspect: boolean },
): Snapshot {
  if (snapshot === undefined) {
    return refuse(
      'snapshot-missing',
      idOrAlias.slice(0, 200),
      `there is no snapshot ${quote(idOrAlias)}`,
    );
  }
  if (snapshot.state === 'retired') {
    refuse('snapshot-retired', snapshot.id, `snapshot ${snapshot.id} is retired`);
  }
  if (snapshot.invalidReason !== null) {
    const message = `snapshot ${snapshot.id} is marked invalid: ${snapshot.invalidReason}`;
    refuse('snapshot-invalid', snapshot.id, message);
  }
  if (snapshot.suspectReason !== null && !o.allowSuspect) {
    const message = `snapshot ${snapshot.id} is suspect: ${snapshot.suspectReason}`;
    refuse('snapshot-suspect', snapshot.id, message);
  }
  return snapshot;
}

export async function resolveSnapshot(tx: Tx, idOrAlias: string): Promise<ResolvedSnapshot> {
  const found = await findSnapshotBy(tx, idOrAlias);
  const snapshot = requireUsable(found, idOrAlias, { allowSuspect: false });
  const content = await findContent(tx, snapshot.contentId);
  if (content === undefined) {
    return corrupt(`snapshot ${snapshot.id} needs content ${snapshot.contentId}, which is missing`);
  }
  return { snapshot, content };
}

export async function addAlias(tx: Tx, alias: string, snapshotId: SnapshotId): Promise<void> {
  const snapshot = await findSnapshot(tx, snapshotId, 'update');
  if (snapshot === undefined) {
    return refuse('snapshot-missing', snapshotId, `there is no snapshot ${snapshotId}`);
  }
  const owner = await findAlias(tx, alias);
  if (owner === snapshotId) return;
  await requireFreeAlias(tx, alias, owner);
  if (snapshot.state === 'retired') {
    refuse('snapshot-retired', snapshotId, `snapshot ${snapshotId} is retired`);
  }
  await insertAlias(tx, alias, snapshotId);
}

export async function setInvalid(
  tx: Tx,
  idOrAlias: string,
  reason: string | null,
): Promise<Snapshot> {
  const snapshot = await requireSnapshot(tx, idOrAlias);
  await markInvalid(tx, snapshot.id, reason);
  return { ...snapshot, invalidReason: reason };
}

export async function listSnapshots(tx: Tx, request: ListRequest): Promise<SnapshotPage> {
  const limit = request.limit ?? LIMIT_DEFAULT;
  const after = request.cursor === undefined ? undefined : decodeCursor(request.cursor);
  const found = await selectSnapshots(tx, { ...request, after, limit: limit + 1 });
  const snapshots = found.slice(0, limit);
  const last = snapshots.at(-1);
  const nextCursor = found.length > limit && last !== undefined ? encodeCursor(last) : null;
  return { snapshots, nextCursor };
}

const encodeCursor = ({ createdAtMs, id }: Snapshot): string =>
  Buffer.from(`${createdAtMs}/${id}`).toString('base64url');

function decodeCursor(cursor: string): { createdAtMs: number; id: SnapshotId } {
  const text = cursor.length > 400 ? '' : Buffer.from(cursor, 'base64url').toString();
  const [time = '', id = ''] = text.split('/');
  const createdAtMs = Number(time);
  if (!/^\d{1,16}$/.test(time) || !Number.isSafeInteger(createdAtMs) || !isName(id)) {
    refuse('request-invalid', 'cursor', `cursor: ${quote(cursor)} is not from a page before`);
  }
  return { createdAtMs, id: id as SnapshotId };
}

/** Bottom to top. A chain that does not end in a base layer of depth 1 is a damaged catalog. */
export async function findLineage(tx: Tx, head: LayerUuid): Promise<Layer[]> {
  const chain = (await selectChain(tx, head)).reverse();
  if (chain.length === 0) refuse('layer-missing', head, `layer ${head} is not in the catalog`);
  chain.forEach((layer, index) => {
    const below = chain[index - 1];
    if (layer.predecessor !== (below?.uuid ?? null) || layer.depth !== index + 1) {
      corrupt(`the chain of layer ${head} is broken at ${layer.uuid}`);
    }
  });
  return chain;
}

/** What foreign keys forbid, but damage can do. */
export function corrupt(message: string): never {
  throw new Failure<CatalogError>({ kind: 'catalog-corrupt', message });
}
