/** Commands on what keeps snapshots: names, holds, volumes. All ask the daemon. */
import { randomUUID } from 'node:crypto';
import { InvalidArgumentError, type Command } from 'commander';
import type { Hold, Snapshot, Volume } from '../catalog/catalog.ts';
import { clientFrom, segment } from './client.ts';
import { print } from './context.ts';
import { table, timeText } from './table.ts';

function addAlias(program: Command): void {
  program
    .command('alias')
    .description('name a snapshot, for good')
    .argument('<name>')
    .argument('<snapshot>', 'its id')
    .action(async (alias: string, snapshotId: string, _options, command: Command) => {
      const client = clientFrom(command);
      const named = await client.call<Snapshot>('POST', '/v1/aliases', { alias, snapshotId });
      print(command, named, () => `${alias} names ${named.id}`);
    });
}

function holdRows(holds: readonly Hold[]): string {
  if (holds.length === 0) return 'there are no holds';
  const head = ['HOLD', 'PURPOSE', 'CONTENT', 'NODE', 'TAKEN', 'RELEASED'];
  const rows = holds.map((hold) => [
    hold.id,
    hold.purpose,
    hold.contentId ?? '-',
    hold.nodeId ?? '-',
    timeText(hold.createdAtMs),
    hold.releasedAtMs === null ? '-' : timeText(hold.releasedAtMs),
  ]);
  return table(head, rows);
}

function addHolds(program: Command): void {
  const hold = program.command('hold').description('keep snapshots readable until you say so');
  hold
    .command('take')
    .description('hold a snapshot: its bytes stay until the hold is released')
    .argument('<snapshot>', 'id or alias')
    .option('--purpose <name>', 'for people', 'manual')
    .option('--idempotency-key <key>', 'repeat a request safely (default: a new one)')
    .action(async (snapshot: string, options: TakeOptions, command: Command) => {
      const body = { target: { snapshot }, purpose: options.purpose };
      const key = { 'idempotency-key': options.idempotencyKey ?? randomUUID() };
      const taken = await clientFrom(command).call<Hold>('POST', '/v1/holds', body, key);
      print(command, taken, () => holdRows([taken]));
    });
  hold
    .command('ls')
    .description('list open holds of all nodes')
    .option('--closed', 'those that were released instead')
    .option('--content <content>', 'only those of one content')
    .action(async (options: { closed?: boolean; content?: string }, command: Command) => {
      const query = new URLSearchParams();
      if (options.closed === true) query.set('closed', 'true');
      if (options.content !== undefined) query.set('content', options.content);
      const path = `/v1/holds?${query.toString()}`;
      const { holds } = await clientFrom(command).call<{ holds: Hold[] }>('GET', path);
      print(command, holds, () => holdRows(holds));
    });
  hold
    .command('release')
    .description('release holds; releasing one again is fine')
    .argument('<hold...>')
    .action(async (ids: string[], _options, command: Command) => {
      const client = clientFrom(command);
      for (const id of ids) await client.call('DELETE', `/v1/holds/${segment(id)}`);
      print(command, { released: ids }, () => `released: ${ids.join(' ')}`);
    });
}

interface TakeOptions {
  readonly purpose: string;
  readonly idempotencyKey?: string;
}

function volumeRows(volumes: readonly Volume[]): string {
  if (volumes.length === 0) return 'there are no volumes';
  const head = ['VOLUME', 'VERSION', 'CONTENT', 'CREATED', 'SWITCHED'];
  const rows = volumes.map((volume) => [
    volume.id,
    String(volume.version),
    volume.contentId,
    timeText(volume.createdAtMs),
    timeText(volume.switchedAtMs),
  ]);
  return table(head, rows);
}

function version(text: string): number {
  if (!/^[1-9]\d{0,14}$/.test(text)) throw new InvalidArgumentError('use a number from 1 on.');
  return Number(text);
}

/** The content behind a snapshot's id or alias. */
async function contentOf(command: Command, snapshot: string): Promise<string> {
  const path = `/v1/snapshots/${segment(snapshot)}`;
  return (await clientFrom(command).call<{ snapshot: Snapshot }>('GET', path)).snapshot.contentId;
}

function addVolumes(program: Command): void {
  const volume = program.command('volume').description('names whose backing can be switched');
  volume
    .command('create')
    .description('create a volume backed by what a snapshot points at')
    .argument('<volume>')
    .argument('<snapshot>', 'id or alias')
    .action(async (id: string, snapshot: string, _options, command: Command) => {
      const body = { id, contentId: await contentOf(command, snapshot) };
      const made = await clientFrom(command).call<Volume>('POST', '/v1/volumes', body);
      print(command, made, () => volumeRows([made]));
    });
  volume
    .command('ls')
    .description('list volumes')
    .option('--after <volume>', 'go on after this one')
    .action(async (options: { after?: string }, command: Command) => {
      const after = options.after === undefined ? '' : `?after=${segment(options.after)}`;
      const path = `/v1/volumes${after}`;
      const { volumes } = await clientFrom(command).call<{ volumes: Volume[] }>('GET', path);
      print(command, volumes, () => volumeRows(volumes));
    });
  volume
    .command('show')
    .description('show one volume')
    .argument('<volume>')
    .action(async (id: string, _options, command: Command) => {
      const path = `/v1/volumes/${segment(id)}`;
      const shown = await clientFrom(command).call<Volume>('GET', path);
      print(command, shown, () => volumeRows([shown]));
    });
  volume
    .command('switch')
    .description('back a volume by another snapshot, if it is still at the version')
    .argument('<volume>')
    .argument('<snapshot>', 'id or alias')
    .requiredOption('--at <version>', 'the version that you have seen', version)
    .action(async (id: string, snapshot: string, options: SwitchOptions, command: Command) => {
      const body = { version: options.at, contentId: await contentOf(command, snapshot) };
      const path = `/v1/volumes/${segment(id)}/switch`;
      const switched = await clientFrom(command).call<Volume>('POST', path, body);
      print(command, switched, () => volumeRows([switched]));
    });
  volume
    .command('rm')
    .description('delete volumes; deleting one again is fine')
    .argument('<volume...>')
    .action(async (ids: string[], _options, command: Command) => {
      const client = clientFrom(command);
      for (const id of ids) await client.call('DELETE', `/v1/volumes/${segment(id)}`);
      print(command, { deleted: ids }, () => `deleted: ${ids.join(' ')}`);
    });
}

interface SwitchOptions {
  readonly at: number;
}

export function addClaimCommands(program: Command): void {
  addAlias(program);
  addHolds(program);
  addVolumes(program);
}
