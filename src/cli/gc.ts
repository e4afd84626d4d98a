/**
 * `varve gc` and `varve node`: collect garbage, look at what a run would do, end what a dead
 * node left.
 */
import type { Command } from 'commander';
import { openCatalog } from '../catalog/open.ts';
import { Collector } from '../gc/collector.ts';
import type { GcPreview, GcReport } from '../gc/collector.ts';
import { gcConfigOf } from '../gc/service.ts';
import { nodeId } from '../units.ts';
import { configFrom, print } from './context.ts';
import { catalogOptions, openStore, valueOf } from './parts.ts';
import { untilSignal } from './signals.ts';
import { countText, msText, sizeText, table, timeText } from './table.ts';

interface GcFlags {
  readonly dryRun?: boolean;
  readonly force?: boolean;
  readonly runs?: boolean;
}

/** Stops between two of its transactions. */
async function collect(command: Command, flags: GcFlags, signal: AbortSignal): Promise<void> {
  const config = configFrom(command);
  const catalog = valueOf(await openCatalog(catalogOptions(config)));
  try {
    const store = valueOf(await openStore(config));
    const deps = { database: catalog.database, store, name: `cli:${config.node.id}` };
    const collector = new Collector(deps, gcConfigOf(config.gc));
    if (flags.runs === true) {
      const runs = valueOf(await collector.runs(20));
      print(command, runs, () =>
        table(
          ['STARTED', 'COLLECTOR', 'OUTCOME', 'LAYERS', 'OBJECTS', 'BYTES', 'MESSAGE'],
          runs.map((run) => [
            timeText(run.startedAtMs),
            run.collector,
            run.outcome ?? 'unfinished',
            countText(run.layersCondemned),
            countText(run.artifactsReclaimed),
            sizeText(run.bytesReclaimed),
            run.message ?? '',
          ]),
        ),
      );
    } else if (flags.dryRun === true) {
      const plan = valueOf(await collector.plan(signal));
      print(command, plan, () => planText(plan));
    } else {
      const report = valueOf(await collector.run({ force: flags.force === true }, signal));
      print(command, report, () => reportText(report));
    }
  } finally {
    await catalog.close();
  }
}

function planText(plan: GcPreview): string {
  const rows = [
    ['contents', countText(plan.contents.length)],
    ['layers', countText(plan.layers.length)],
    ['objects', countText(plan.artifacts.length)],
    ['bytes', sizeText(Number(plan.bytes))],
    ['queued by earlier runs', countText(plan.backlog.objects)],
    ['bytes of those', sizeText(Number(plan.backlog.bytes))],
  ];
  const guard = plan.massDelete ? '\nThe mass-delete guard would stop this run: see --force.' : '';
  const layers = plan.layers.map((uuid) => `\n  layer ${uuid}`).join('');
  return `${table(['WOULD GO', ''], rows)}${layers}${guard}`;
}

function reportText(report: GcReport): string {
  const { contentsDeleted, layersCondemned, objectsReclaimed, bytesReclaimed } = report;
  const trimmed = report.holdsTrimmed + report.snapshotsTrimmed;
  return (
    `deleted ${countText(contentsDeleted)} contents and ${countText(layersCondemned)} layers, ` +
    `reclaimed ${countText(objectsReclaimed)} objects (${sizeText(bytesReclaimed)}), ` +
    `trimmed ${countText(trimmed)} records in ${msText(report.durationMs)}`
  );
}

export function addGc(program: Command): void {
  program
    .command('gc')
    .description('collect what no snapshot, hold or volume needs any more')
    .option('--dry-run', 'only say what would go')
    .option('--force', 'go past the mass-delete guard')
    .option('--runs', 'show the latest collections')
    .action((flags: GcFlags, command: Command) =>
      untilSignal((signal) => collect(command, flags, signal)),
    );
}

export function addNode(program: Command): void {
  const node = program.command('node').description('nodes that the catalog knows');
  node
    .command('ls')
    .description('list them')
    .action(async (_flags: object, command: Command) => {
      const catalog = valueOf(await openCatalog(catalogOptions(configFrom(command))));
      try {
        const nodes = valueOf(await catalog.listNodes());
        print(command, nodes, () =>
          table(
            ['NODE', 'REGISTERED', 'FORGOTTEN'],
            nodes.map(({ id, registeredAtMs, forgottenAtMs }) => [
              id,
              timeText(registeredAtMs),
              forgottenAtMs === null ? '' : timeText(forgottenAtMs),
            ]),
          ),
        );
      } finally {
        await catalog.close();
      }
    });
  node
    .command('forget')
    .argument('<id>', 'a node that will not be back under this id')
    .description("release a dead node's holds and drop its unfinished uploads; its id is spent")
    .action(async (id: string, _flags: object, command: Command) => {
      const config = configFrom(command);
      const catalog = valueOf(await openCatalog(catalogOptions(config)));
      try {
        const forgotten = valueOf(await catalog.forgetNode(nodeId(id)));
        const store = valueOf(await openStore(config));
        const done = { ...forgotten, filesRemoved: valueOf(await store.forgetNode(nodeId(id))) };
        print(
          command,
          done,
          () =>
            `forgot ${id}: released ${countText(done.holdsReleased)} holds, ` +
            `queued ${countText(done.uploadsReclaimed)} unfinished uploads for reclaim, ` +
            `removed ${countText(done.filesRemoved)} unfinished files`,
        );
      } finally {
        await catalog.close();
      }
    });
}
