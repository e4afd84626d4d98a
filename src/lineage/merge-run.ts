import { mergeLayers } from '../layer/merge.ts';
import type { Compression } from '../layer/format.ts';
import { verifyLayers } from '../layer/verify.ts';
import { err, ok } from '../result.ts';
import type { MergeRun } from './compaction.ts';

/**
 * The merge that compaction uses: every layer of the run is checked from end to end against its digest
 * first, since a damaged one must not get a fresh digest.
 */
export function checkedMerge(form: { compression: Compression; blockBytes: number }): MergeRun {
  return async ({ run, below, uuid, path, signal }) => {
    const paths = run.map((layer) => layer.path);
    const digests = run.map((layer) => layer.digest);
    const report = await verifyLayers({ paths, digests, partial: true, signal });
    const [finding] = report.layers.flatMap((layer) => layer.findings);
    if (finding !== undefined) return err(finding);
    const merged = await mergeLayers({
      ...form,
      paths,
      below: below.map((layer) => layer.path),
      parentUuid: below.at(-1)?.uuid ?? null,
      output: path,
      uuid,
      order: 'check',
      signal,
    });
    return merged.ok ? ok(merged.value.sealed) : merged;
  };
}
