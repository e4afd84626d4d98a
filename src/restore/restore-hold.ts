/** The hold under which a snapshot is read: taken before the first read, released at the end. */
import type { Catalog } from '../catalog/catalog.ts';
import type { FailureDetail } from '../result.ts';
import type { HoldId } from '../units.ts';

/** Who answers for the hold of a restore until it is released. */
export interface RestoreHolds {
  /** Before the catalog is asked for it. Throws where that cannot be made durable. */
  readonly begin: (hold: HoldId) => void;
  /** On every outcome, also of one that the catalog did not give. Never rejects. */
  readonly end: (hold: HoldId) => Promise<void>;
}

/**
 * For a process without node.db, such as `varve restore`: released at once. If the catalog cannot be
 * asked then, or the process is killed before, the hold stays open and keeps its snapshot's bytes:
 * `GET /v1/holds` lists it (purpose `restore`), `DELETE /v1/holds/{holdId}` releases it.
 */
export function directHolds(
  catalog: Pick<Catalog, 'release'>,
  notReleased: (hold: HoldId, error: FailureDetail) => void,
): RestoreHolds {
  return {
    begin: () => undefined,
    end: async (hold) => {
      const released = await catalog.release(hold);
      if (!released.ok) notReleased(hold, released.error);
    },
  };
}
