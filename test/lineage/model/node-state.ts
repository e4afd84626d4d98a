/** What node.db and the daemon's folders say of each other, read from outside. */
import { copyFileSync, existsSync, mkdtempSync, readdirSync, rmSync, statSync } from 'node:fs';
import { join } from 'node:path';
import SqliteConnection from 'better-sqlite3';
import type { Daemon } from '../served.ts';

interface LayerRow {
  readonly uuid: string;
  readonly below: string | null;
  readonly path: string;
  readonly generation: number;
  readonly condemned: number | null;
}

export interface NodeState {
  readonly layers: readonly LayerRow[];
  /** Layers that a VM's heads or a lease name. */
  readonly roots: readonly string[];
  readonly leases: readonly { readonly kind: string; readonly id: string }[];
  readonly compactions: number;
  readonly jobs: readonly { readonly id: string; readonly vm: string; readonly step: string }[];
  readonly paused: readonly string[];
  /** Entries that an attached VM was started from. */
  readonly prepared: readonly string[];
  readonly owners: readonly { readonly hold: string; readonly kind: string; readonly id: string }[];
  readonly attached: readonly string[];
  readonly releases: readonly string[];
}

/** The daemon keeps node.db locked: a copy is read, of a moment in which nothing was written. */
export function readNodeState(folder: string): NodeState {
  const copy = mkdtempSync(join(folder, 'node-state-'));
  try {
    for (;;) {
      const before = shapeOf(folder);
      for (const name of files.filter((each) => existsSync(join(folder, 'state', each)))) {
        copyFileSync(join(folder, 'state', name), join(copy, name));
      }
      if (shapeOf(folder) === before) return readCopy(join(copy, 'node.db'));
    }
  } finally {
    rmSync(copy, { recursive: true });
  }
}

const files = ['node.db', 'node.db-wal'];

function shapeOf(folder: string): string {
  const stats = files.map((name) =>
    statSync(join(folder, 'state', name), { bigint: true, throwIfNoEntry: false }),
  );
  return stats.map((stat) => `${stat?.size} ${stat?.mtimeNs}`).join();
}

function readCopy(path: string): NodeState {
  const db = new SqliteConnection(path);
  try {
    const all = <T>(sql: string): T[] => db.prepare(sql).all() as T[];
    const read = db.transaction(() => ({
      layers: all<LayerRow>(
        `SELECT uuid, below_uuid AS below, path, generation, condemned_at_ms AS condemned
         FROM local_layer ORDER BY uuid`,
      ),
      roots: all<{ uuid: string }>(
        `SELECT launch_head AS uuid FROM vm WHERE launch_head IS NOT NULL
         UNION SELECT memory_head FROM vm WHERE memory_head IS NOT NULL
         UNION SELECT layer_uuid FROM lease ORDER BY 1`,
      ).map(({ uuid }) => uuid),
      leases: all<{ kind: string; id: string }>(
        'SELECT holder_kind AS kind, holder_id AS id FROM lease ORDER BY 1, 2',
      ),
      compactions: all('SELECT compaction_id FROM compaction').length,
      jobs: all<{ id: string; vm: string; step: string }>(
        'SELECT capture_id AS id, vm_id AS vm, step FROM capture_job ORDER BY 1',
      ),
      paused: all<{ id: string }>('SELECT vm_id AS id FROM vm WHERE paused_by IS NOT NULL').map(
        ({ id }) => id,
      ),
      prepared: all<{ id: string }>(
        `SELECT DISTINCT prepared_id AS id FROM vm
         WHERE detached_at_ms IS NULL AND prepared_id IS NOT NULL`,
      ).map(({ id }) => id),
      owners: all<{ hold: string; kind: string; id: string }>(
        'SELECT hold_id AS hold, owner_kind AS kind, owner_id AS id FROM hold_owner ORDER BY 1, 2, 3',
      ),
      attached: all<{ id: string }>('SELECT vm_id AS id FROM vm WHERE detached_at_ms IS NULL').map(
        ({ id }) => id,
      ),
      releases: all<{ id: string }>('SELECT hold_id AS id FROM release_queue ORDER BY 1').map(
        ({ id }) => id,
      ),
    }));
    return read();
  } finally {
    db.close();
  }
}

const unfinished = ['created', 'intended', 'recorded', 'sealed', 'committed'];
const names = (folder: string): string[] => (existsSync(folder) ? readdirSync(folder) : []);

/** What is left over or missing now; empty where all is as it must be at rest. */
export function leftovers(folder: string): string[] {
  const state = readNodeState(folder);
  const found: string[] = [];
  const open = state.jobs.filter(({ step }) => unfinished.includes(step));
  for (const { id, step } of open) found.push(`capture ${id} is ${step}`);
  if (state.compactions > 0) found.push(`${state.compactions} compactions are running`);
  for (const vm of state.paused) found.push(`VM ${vm} is marked as paused by us`);
  const used = new Set(state.prepared);
  for (const { kind, id } of state.leases) {
    if (kind !== 'prepared' || !used.has(id)) found.push(`a lease of ${kind} ${id}`);
  }
  const owners = { vm: new Set(state.attached), prepared: used };
  for (const { hold, kind, id } of state.owners) {
    const known = kind === 'vm' || kind === 'prepared' ? owners[kind] : new Set<string>();
    if (!known.has(id)) found.push(`hold ${hold} is owned by ${kind} ${id}`);
  }

  const needed = new Set(state.roots);
  const byUuid = new Map(state.layers.map((layer) => [layer.uuid, layer]));
  for (const root of state.roots) {
    for (
      let at = byUuid.get(root)?.below ?? null;
      at !== null;
      at = byUuid.get(at)?.below ?? null
    ) {
      needed.add(at);
    }
  }
  for (const layer of state.layers) {
    if (!needed.has(layer.uuid)) found.push(`layer ${layer.uuid} is kept and nothing needs it`);
    if (layer.condemned !== null) found.push(`layer ${layer.uuid} is condemned and still there`);
    if (!existsSync(layer.path)) found.push(`layer ${layer.uuid} has no file`);
  }
  const known = new Set(state.layers.map((layer) => layer.path));
  const layers = join(folder, 'state/layers');
  for (const name of names(layers)) {
    if (!known.has(join(layers, name))) found.push(`file ${name} in layers is nobody's`);
  }
  const openIds = new Set(open.map(({ id }) => id));
  for (const name of names(join(folder, 'state/staging'))) {
    if (!openIds.has(name)) found.push(`folder ${name} in staging is nobody's`);
  }
  const prepared = join(folder, 'state/prepared');
  for (const name of names(prepared)) {
    if (!used.has(name)) found.push(`folder ${name} in prepared is nobody's`);
  }
  return found;
}

/**
 * Waits while releases are sent; then the catalog's open holds must be the ones that somebody on the
 * node owns. Returns those.
 */
export async function holdsSettled(daemon: Daemon): Promise<readonly string[]> {
  for (let quiet = 0; ;) {
    const { body } = await daemon.send('GET', '/v1/holds?limit=1000');
    const { owners, releases } = readNodeState(daemon.folder);
    const open = (body as { holds: readonly { id: string }[] }).holds.map(({ id }) => id).sort();
    const owned = [...new Set(owners.map(({ hold }) => hold))].sort();
    if (releases.length > 0) continue;
    if (open.join() === owned.join()) return open;
    // Read one after the other: a release may have gone in between.
    if ((quiet += 1) > 3) throw new Error(`open: ${open.join()}; owned: ${owned.join()}`);
  }
}
