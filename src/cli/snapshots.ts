/** Commands on snapshots. All but `restore` ask the daemon. */
import { Option, type Command } from 'commander';
import type { Content, Layer, Snapshot, SnapshotPage } from '../catalog/catalog.ts';
import { openCatalog } from '../catalog/open.ts';
import type { VmView } from '../capture/types.ts';
import { materialise } from '../restore/materialise.ts';
import { directHolds } from '../restore/restore-hold.ts';
import type { FailureDetail } from '../result.ts';
import { nodeId, type HoldId } from '../units.ts';
import { clientFrom, segment, type Client } from './client.ts';
import { configFrom, print, ProblemAnswer } from './context.ts';
import { catalogOptions, openStore, valueOf } from './parts.ts';
import { progressLine } from './progress.ts';
import { untilSignal } from './signals.ts';
import { sizeText, table, timeText } from './table.ts';

function snapshotRows(snapshots: readonly Snapshot[]): string {
  if (snapshots.length === 0) return 'there are no snapshots';
  const head = ['SNAPSHOT', 'VM', 'STATE', 'CREATED', 'ALIASES'];
  const rows = snapshots.map((snapshot) => [
    snapshot.id,
    snapshot.sourceVm,
    stateText(snapshot),
    timeText(snapshot.createdAtMs),
    snapshot.aliases.join(' ') || '-',
  ]);
  return table(head, rows);
}

function stateText({ state, invalidReason, suspectReason }: Snapshot): string {
  const marks = [
    invalidReason === null ? [] : ['invalid'],
    suspectReason === null ? [] : ['suspect'],
  ];
  return [state, ...marks.flat()].join(', ');
}

function snapshotText(snapshot: Snapshot, content: Content | null): string {
  const lines = [snapshotRows([snapshot])];
  if (snapshot.invalidReason !== null) lines.push(`invalid: ${snapshot.invalidReason}`);
  if (snapshot.suspectReason !== null) lines.push(`suspect: ${snapshot.suspectReason}`);
  if (content === null) return [...lines, 'its content has been deleted'].join('\n');
  const { manifest, heads, artifacts } = content;
  const rows = [
    ...heads.map((head) => [head.role, `layer ${head.layer}`, '-', '-']),
    ...[{ name: 'manifest', artifact: manifest }, ...artifacts].map(({ name, artifact }) => [
      name,
      artifact.key,
      sizeText(artifact.sizeBytes),
      artifact.digest,
    ]),
  ];
  return [...lines, '', table(['PART', 'WHAT', 'SIZE', 'DIGEST'], rows)].join('\n');
}

type ChainLayer = Layer & { readonly epoch: number | null };

/** A chain from the top down, as a tree of one branch. */
function chainText(layers: readonly ChainLayer[]): string {
  if (layers.length === 0) return 'the chain is empty';
  const lines = [...layers].reverse().map((layer) => {
    const branch = layer.depth === 1 ? '└─' : '├─';
    const epoch = `epoch ${layer.epoch ?? '-'}`;
    const size = sizeText(layer.artifact.sizeBytes);
    return `${branch} ${layer.uuid}  depth ${layer.depth}  ${epoch}  ${size}`;
  });
  const total = layers.reduce((sum, layer) => sum + layer.artifact.sizeBytes, 0);
  return [...lines, `${layers.length} layers, ${sizeText(total)}`].join('\n');
}

interface ListOptions {
  readonly vm?: string;
  readonly alias?: string;
  readonly state?: string;
  readonly limit?: string;
  readonly cursor?: string;
}

function addList(program: Command): void {
  program
    .command('ls')
    .description('list snapshots, newest first')
    .option('--vm <vm>', 'only those captured from one VM')
    .option('--alias <alias>', 'only the one of this name')
    .addOption(new Option('--state <state>', 'only these').choices(['active', 'retired']))
    .option('--limit <count>', 'how many', '100')
    .option('--cursor <cursor>', 'go on where the last page ended')
    .action(async (options: ListOptions, command: Command) => {
      const query = new URLSearchParams();
      if (options.vm !== undefined) query.set('sourceVm', options.vm);
      for (const key of ['alias', 'state', 'limit', 'cursor'] as const) {
        const value = options[key];
        if (value !== undefined) query.set(key, value);
      }
      const path = `/v1/snapshots?${query.toString()}`;
      const page = await clientFrom(command).call<SnapshotPage>('GET', path);
      const more = page.nextCursor === null ? '' : `\nmore: --cursor ${page.nextCursor}`;
      print(command, page, () => snapshotRows(page.snapshots) + more);
    });
}

function addShow(program: Command): void {
  program
    .command('show')
    .description('show a snapshot by id or alias')
    .argument('<snapshot>')
    .action(async (id: string, _options, command: Command) => {
      const shown = await clientFrom(command).call<{
        snapshot: Snapshot;
        content: Content | null;
      }>('GET', `/v1/snapshots/${segment(id)}`);
      print(command, shown, () => snapshotText(shown.snapshot, shown.content));
    });
  program
    .command('rm')
    .description('retire snapshots: hide them from new users')
    .argument('<snapshot...>')
    .action(async (ids: string[], _options, command: Command) => {
      const client = clientFrom(command);
      const retired: Snapshot[] = [];
      for (const id of ids) {
        retired.push(await client.call<Snapshot>('DELETE', `/v1/snapshots/${segment(id)}`));
      }
      print(command, retired, () => snapshotRows(retired));
    });
}

/** A snapshot's chain; for a name that is no snapshot, the last snapshot of the VM so named. */
async function lineageOf(client: Client, name: string): Promise<readonly ChainLayer[]> {
  const chain = (id: string) =>
    client.call<{ layers: ChainLayer[] }>('GET', `/v1/snapshots/${segment(id)}/lineage`);
  try {
    return (await chain(name)).layers;
  } catch (error) {
    if (!(error instanceof ProblemAnswer) || error.code !== 'snapshot-missing') throw error;
    const vm = await client.call<VmView>('GET', `/v1/vms/${segment(name)}`);
    const path = `/v1/snapshots?limit=1&sourceVm=${segment(vm.vmId)}`;
    const { snapshots } = await client.call<SnapshotPage>('GET', path);
    const [last] = snapshots;
    return last === undefined ? [] : (await chain(last.id)).layers;
  }
}

function addLineage(program: Command): void {
  program
    .command('lineage')
    .description('draw the chain of layers of a snapshot, or of the last one of a VM')
    .argument('<snapshot-or-vm>')
    .action(async (name: string, _options, command: Command) => {
      const layers = await lineageOf(clientFrom(command), name);
      print(command, layers, () => chainText(layers));
    });
}

function holdStays(hold: HoldId, { message }: FailureDetail): void {
  process.stderr.write(
    `hold ${hold} could not be released (${message}): it keeps the snapshot's bytes until\n` +
      `DELETE /v1/holds/${hold}\n`,
  );
}

interface RestoreOptions {
  readonly output: string;
  readonly allowSuspect?: boolean;
}

function addRestore(program: Command): void {
  program
    .command('restore')
    .description('write the files that a VMM loads: flat memory and VM state (no daemon needed)')
    .argument('<snapshot>', 'id or alias')
    .requiredOption('--output <folder>', 'where to write them; made if missing')
    .option('--allow-suspect', 'also where a verification found that its layers lack pages')
    .action((snapshot: string, options: RestoreOptions, command: Command) =>
      untilSignal((signal) => restore(snapshot, options, command, signal)),
    );
}

async function restore(
  snapshot: string,
  options: RestoreOptions,
  command: Command,
  signal: AbortSignal,
): Promise<void> {
  const config = configFrom(command);
  const catalog = valueOf(await openCatalog(catalogOptions(config)));
  try {
    const store = valueOf(await openStore(config));
    // Its hold names a node: this one, whether or not a daemon ever ran here.
    const node = nodeId(config.node.id);
    valueOf(await catalog.registerNode({ nodeId: node }));
    const holds = directHolds(catalog, holdStays);
    using line = progressLine();
    const made = await materialise(
      { catalog, store, nodeId: node, holds },
      {
        snapshot,
        folder: options.output,
        allowSuspect: options.allowSuspect,
        signal,
        onProgress: (at) => line.bar('restore', at.doneBytes, at.totalBytes),
      },
    );
    line[Symbol.dispose]();
    const { snapshotId, memoryPath, vmStatePath } = made;
    print(command, { snapshotId, memoryPath, vmStatePath }, () =>
      [`memory    ${memoryPath}`, `vm state  ${vmStatePath ?? 'none'}`].join('\n'),
    );
  } finally {
    await catalog.close();
  }
}

export function addSnapshotCommands(program: Command): void {
  addList(program);
  addShow(program);
  addLineage(program);
  addRestore(program);
}
