/**
 * `varve fsck`: compare catalog, store and layer headers from scratch. Exit status 1 if anything
 * is wrong.
 */
import type { Command } from 'commander';
import type { ArtifactStore } from '../artifact/store.ts';
import { openCatalog } from '../catalog/open.ts';
import { Audit } from '../gc/audit.ts';
import type { AuditReport, LayerHeader } from '../gc/audit.ts';
import { LayerStack } from '../layer/layer-stack.ts';
import type { ArtifactKey } from '../units.ts';
import { configFrom, exitCodes, print } from './context.ts';
import { untilSignal } from './signals.ts';
import { catalogOptions, openStore, valueOf } from './parts.ts';
import { countText, sizeText, table } from './table.ts';

interface FsckFlags {
  readonly bytes?: boolean;
  readonly repair?: boolean;
}

/** The headers of a stored layer, by the room that reads layers. Text: why they cannot be read. */
export function headerReader(
  store: ArtifactStore,
): (key: ArtifactKey) => Promise<LayerHeader | string | null> {
  return async (key) => {
    const path = store.localPath(key);
    if (path === null) return null;
    const opened = await LayerStack.open([path], { order: 'ignore' });
    if (!opened.ok) return `object ${key} is no readable layer: ${opened.error.message}`;
    await using stack = opened.value;
    return stack.layers[0] ?? `object ${key} holds no layer`;
  };
}

function reportText({ findings, objectsChecked, bytesVerified, omitted }: AuditReport): string {
  const checked = `checked ${countText(objectsChecked)} objects`;
  const read = bytesVerified > 0 ? `, read ${sizeText(bytesVerified)}` : '';
  if (findings.length === 0) return `${checked}${read}: nothing is wrong`;
  const rows = findings.map((finding) => [
    finding.repaired ? `${finding.kind} (queued)` : finding.kind,
    finding.message,
  ]);
  const more = omitted > 0 ? `\n… and ${countText(omitted)} more` : '';
  return `${table(['FOUND', 'WHAT'], rows)}${more}\n${checked}${read}`;
}

export function addFsck(program: Command): void {
  program
    .command('fsck')
    .description('compare catalog, artifact store and layer headers; exit status 1 if they differ')
    .option('--bytes', 'read every byte and compare digests')
    .option('--repair', 'queue leaked things for collection; touches nothing else')
    .action(async (flags: FsckFlags, command: Command) => {
      const config = configFrom(command);
      const catalog = valueOf(await openCatalog(catalogOptions(config)));
      try {
        const store = valueOf(await openStore(config));
        const deps = { database: catalog.database, store, readHeader: headerReader(store) };
        const options = { bytes: flags.bytes === true, repair: flags.repair === true };
        const report = await untilSignal((signal) => new Audit(deps, options).run(signal));
        print(command, report, () => reportText(report));
        if (report.findings.some(({ repaired }) => !repaired)) {
          process.exitCode = exitCodes.failed;
        }
      } finally {
        await catalog.close();
      }
    });
}
