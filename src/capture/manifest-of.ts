import type { Manifest } from '../artifact/manifest.ts';
import type { StoredArtifact } from '../artifact/store.ts';
import type { CaptureId, LayerUuid, NodeId } from '../units.ts';
import type { HostFacts, Virtualization } from './host-facts.ts';
import type { PublishPlan } from './publish-plan.ts';

export interface ManifestParts {
  readonly plan: PublishPlan;
  readonly captureId: CaptureId;
  readonly nodeId: NodeId;
  readonly host: HostFacts;
  readonly virtualization: Virtualization;
  /** Bottom to top. */
  readonly chain: readonly {
    readonly uuid: LayerUuid;
    readonly predecessor: LayerUuid | null;
    readonly artifact: StoredArtifact;
  }[];
  readonly vmState: StoredArtifact | null;
}

export function manifestOf(parts: ManifestParts): Manifest {
  const { plan, vmState } = parts;
  return {
    version: 1,
    snapshotId: plan.snapshotId,
    contentId: plan.contentId,
    createdAtMs: plan.createdAtMs,
    source: { vm: plan.vm, node: parts.nodeId, captureId: parts.captureId, epoch: plan.epoch },
    memory: {
      size: plan.imageBytes,
      pageSize: 4096,
      regions: plan.regions.map((region) => ({ ...region })),
      layers: parts.chain.map(({ uuid, predecessor, artifact }) => ({
        uuid,
        predecessor,
        digest: artifact.digest,
        size: artifact.sizeBytes,
        artifact: artifact.key,
      })),
    },
    vmState:
      vmState === null
        ? null
        : { key: vmState.key, digest: vmState.digest, size: vmState.sizeBytes },
    heads: {},
    vmm: { ...plan.vmm, virtualization: parts.virtualization },
    host: { ...parts.host },
  };
}
