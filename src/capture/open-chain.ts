/** Opens a memory parent, and refuses files that are not the layers node.db has recorded. */
import { LayerStack } from '../layer/layer-stack.ts';
import type { ChainRef } from '../lineage/layers.queries.ts';
import { err, ok, type FailureDetail, type Result } from '../result.ts';

/**
 * Headers, indexes, sizes and uuids are checked, not the data: that is what compaction, digest-checked
 * reads and fsck do. Fails as `LayerStack.open`, or with `layer-mismatch`.
 */
export async function openChain(chain: ChainRef): Promise<Result<LayerStack, FailureDetail>> {
  const opened = await LayerStack.open(chain.layers.map((layer) => layer.path));
  if (!opened.ok) return opened;
  const stack = opened.value;
  for (const [depth, recorded] of chain.layers.entries()) {
    const found = stack.layers[depth];
    if (found?.uuid === recorded.uuid && found.sizeBytes === recorded.sizeBytes) continue;
    await stack[Symbol.asyncDispose]();
    const message =
      `${recorded.path} is not the recorded layer: it is ${found?.uuid ?? 'nothing'} of ` +
      `${found?.sizeBytes ?? 0} bytes, recorded is ${recorded.uuid} of ${recorded.sizeBytes} bytes`;
    return err({ kind: 'layer-mismatch', message });
  }
  return ok(stack);
}
