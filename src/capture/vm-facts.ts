import { z } from 'zod';
import type { VmRecord } from '../lineage/vms.queries.ts';
import type { MemoryLayout } from '../memory.ts';
import { bytes, guestAddress, hostAddress } from '../units.ts';

/** What the record of a VM keeps for this room. */
export interface VmRecordFacts {
  /** Of the VMM, as it says. */
  readonly version: string;
  /** Where the process has its guest's memory; null until a capture found out. */
  readonly layout: MemoryLayout | null;
}

export function factsOf(vm: VmRecord): VmRecordFacts {
  const { version, layout } = JSON.parse(vm.factsJson) as {
    readonly version?: string;
    readonly layout?: unknown;
  };
  return {
    version: version ?? 'unknown',
    layout: layout == null ? null : keptLayout.parse(layout),
  };
}

const address = z.string().transform((text) => BigInt(text));

/** node.db is ours alone: anything else in it is damage, and throws. */
const keptLayout = z.strictObject({
  imageBytes: z.int().transform(bytes),
  regions: z.array(
    z.strictObject({
      guestAddress: address.transform(guestAddress).nullable(),
      hostAddress: address.transform(hostAddress),
      imageOffset: z.int().transform(bytes),
      length: z.int().transform(bytes),
    }),
  ),
});

/** As `factsOf` reads it back; addresses are decimal, since they pass 2^53. */
export function layoutJson({ imageBytes, regions }: MemoryLayout): string {
  return JSON.stringify({
    imageBytes,
    regions: regions.map((region) => ({
      ...region,
      guestAddress: region.guestAddress?.toString() ?? null,
      hostAddress: region.hostAddress.toString(),
    })),
  });
}
