/**
 * fsck: a full mark from scratch, compared with the store and with layer headers. Runs beside a
 * live system: whatever looks wrong is looked at again before it is reported. Repair touches leaks
 * only, and only queues them; the collector deletes, behind its guard.
 */
import type { ArtifactStore, ListedObject } from '../artifact/store.ts';
import { parseArtifactKey } from '../artifact/store.ts';
import {
  pageOfObjects,
  selectDangling,
  selectKnownKeys,
  selectLeakedArtifacts,
  selectLeakedContents,
  selectLeakedLayers,
  selectTornKeys,
  selectWrongDepths,
} from '../catalog/audit.queries.ts';
import type { AuditedObject } from '../catalog/audit.queries.ts';
import { queueContents, queueLayers } from '../catalog/candidate.queries.ts';
import { deleteArtifacts, findArtifacts } from '../catalog/artifact.queries.ts';
import type { Transactions } from '../catalog/database.ts';
import { insertReclaims } from '../catalog/reclaim.queries.ts';
import type { ArtifactKey, Bytes, LayerUuid } from '../units.ts';

/**
 * `dangling`: needed, and not there. `leaked`: there, and not needed. `corrupt`: bytes or records
 * that contradict each other. `misplaced`: in the store under no name of ours, or under another's.
 */
export type FindingKind = 'dangling' | 'leaked' | 'corrupt' | 'misplaced';

export interface Finding {
  readonly kind: FindingKind;
  /** A key, uuid, id, or the name of a file. */
  readonly subject: string;
  readonly message: string;
  /** Set once repair has queued it. */
  readonly repaired: boolean;
}

export interface AuditReport {
  readonly findings: readonly Finding[];
  readonly objectsChecked: number;
  readonly bytesVerified: number;
  /** Findings of one sort beyond the limit are only counted here. */
  readonly omitted: number;
}

/** What a layer's own headers say. */
export interface LayerHeader {
  readonly uuid: LayerUuid;
  readonly parentUuid: LayerUuid | null;
  readonly virtualBytes: Bytes;
}

export interface AuditDeps {
  readonly database: Transactions;
  readonly store: ArtifactStore;
  /**
   * Reads the headers of a stored layer; null where the store has no paths. Text: why it cannot.
   */
  readonly readHeader: (key: ArtifactKey) => Promise<LayerHeader | string | null>;
}

export interface AuditOptions {
  /** Read every byte and compare digests. Otherwise only presence, sizes and layer headers. */
  readonly bytes: boolean;
  /** Queue leaks for collection. */
  readonly repair: boolean;
  readonly onProgress?: ((checked: number) => void) | undefined;
}

const PAGE_ROWS = 500;
/** Per sort of finding: a store mounted at the wrong place must not fill the terminal. */
const FINDINGS_MAX = 1000;

export class Audit {
  readonly #deps: AuditDeps;
  readonly #options: AuditOptions;
  readonly #findings: Finding[] = [];
  readonly #counts = new Map<FindingKind, number>();
  #omitted = 0;
  #objectsChecked = 0;
  #bytesVerified = 0;

  constructor(deps: AuditDeps, options: AuditOptions) {
    this.#deps = deps;
    this.#options = options;
  }

  /** Throws `Failure<CatalogError | ArtifactError>` where something cannot be read at all. */
  async run(signal: AbortSignal): Promise<AuditReport> {
    await this.#records();
    await this.#recordLeaks();
    const present = await this.#storedObjects(signal);
    await this.#neededObjects(present, signal);
    return {
      findings: this.#findings,
      objectsChecked: this.#objectsChecked,
      bytesVerified: this.#bytesVerified,
      omitted: this.#omitted,
    };
  }

  #add(kind: FindingKind, subject: string, message: string, repaired = false): void {
    const count = (this.#counts.get(kind) ?? 0) + 1;
    this.#counts.set(kind, count);
    if (count > FINDINGS_MAX) this.#omitted += 1;
    else this.#findings.push({ kind, subject, message, repaired });
  }

  async #records(): Promise<void> {
    const { database } = this.#deps;
    await database.read('audit-records', async (tx) => {
      for (const { column, value } of await selectDangling(tx, PAGE_ROWS)) {
        this.#add('dangling', value, `${column} refers to ${value}, which has no record`);
      }
      for (const uuid of await selectWrongDepths(tx, PAGE_ROWS)) {
        this.#add('corrupt', uuid, `layer ${uuid} is not one above its predecessor`);
      }
      for (const key of await selectTornKeys(tx, PAGE_ROWS)) {
        this.#add('corrupt', key, `object ${key} is needed and queued or uploading at once`);
      }
    });
  }

  /**
   * Rows that nothing needs. Repair hands them to the collector, which decides again under locks.
   */
  async #recordLeaks(): Promise<void> {
    const { database } = this.#deps;
    const { repair } = this.#options;
    const found = await database.read('audit-leaks', async (tx) => ({
      contents: await selectLeakedContents(tx, FINDINGS_MAX),
      layers: await selectLeakedLayers(tx, FINDINGS_MAX),
      artifacts: await selectLeakedArtifacts(tx, FINDINGS_MAX),
    }));
    if (repair) {
      await database.write('audit-repair', async (tx) => {
        await queueContents(tx, found.contents);
        await queueLayers(tx, found.layers);
        const artifacts = [...(await findArtifacts(tx, found.artifacts, 'update')).values()];
        await deleteArtifacts(
          tx,
          artifacts.map(({ key }) => key),
        );
        await insertReclaims(tx, artifacts);
      });
    }
    for (const id of found.contents) {
      this.#add('leaked', id, `content ${id} is claimed by nothing and queued nowhere`, repair);
    }
    for (const uuid of found.layers) {
      this.#add('leaked', uuid, `layer ${uuid} is needed by nothing and queued nowhere`, repair);
    }
    for (const key of found.artifacts) {
      this.#add('leaked', key, `the record of ${key} is needed by nothing`, repair);
    }
  }

  /**
   * Everything in the store that the catalog may know. Uploads are recorded first, so all of it
   * should be.
   */
  async #storedObjects(signal: AbortSignal): Promise<Map<ArtifactKey, Bytes>> {
    const present = new Map<ArtifactKey, Bytes>();
    let page: { key: ArtifactKey; sizeBytes: Bytes }[] = [];
    const flush = async (): Promise<void> => {
      await this.#unknownObjects(page);
      page = [];
    };
    for await (const object of this.#deps.store.list(signal)) {
      if (object.key === null) this.#misplaced(object);
      else {
        present.set(object.key, object.sizeBytes);
        page.push({ key: object.key, sizeBytes: object.sizeBytes });
      }
      if (page.length === PAGE_ROWS) await flush();
    }
    await flush();
    return present;
  }

  #misplaced({ name }: ListedObject): void {
    this.#add('misplaced', name, `${name} in the store is no object of ours, or not at its place`);
  }

  async #unknownObjects(page: readonly { key: ArtifactKey; sizeBytes: Bytes }[]): Promise<void> {
    const { database, store } = this.#deps;
    const keys = page.map(({ key }) => key);
    const known = await database.read('audit-known', (tx) => selectKnownKeys(tx, keys));
    for (const { key, sizeBytes } of page) {
      if (known.has(key)) continue;
      // Reclaimed since it was listed: gone, and nothing to report.
      if (!(await store.head(key)).ok) continue;
      const repaired = this.#options.repair && (await this.#queueObject(key, sizeBytes));
      this.#add('leaked', key, `object ${key} is in the store and not in the catalog`, repaired);
    }
  }

  async #queueObject(key: ArtifactKey, sizeBytes: Bytes): Promise<boolean> {
    const parts = parseArtifactKey(key);
    if (parts === undefined) return false;
    return await this.#deps.database.write('audit-repair', async (tx) => {
      if ((await selectKnownKeys(tx, [key])).has(key)) return false;
      await insertReclaims(tx, [{ key, kind: parts.kind, digest: parts.digest, sizeBytes }]);
      return true;
    });
  }

  async #neededObjects(
    present: ReadonlyMap<ArtifactKey, Bytes>,
    signal: AbortSignal,
  ): Promise<void> {
    const { database } = this.#deps;
    for (let after = ''; ;) {
      signal.throwIfAborted();
      const page = await database.read('audit-objects', (tx) =>
        pageOfObjects(tx, after, PAGE_ROWS),
      );
      if (page.length === 0) return;
      for (const object of page) {
        await this.#object(object, present.get(object.key), signal);
        this.#objectsChecked += 1;
        after = object.key;
      }
      this.#options.onProgress?.(this.#objectsChecked);
    }
  }

  async #object(
    object: AuditedObject,
    listed: Bytes | undefined,
    signal: AbortSignal,
  ): Promise<void> {
    const { key, kind, digest, sizeBytes } = object;
    const parts = parseArtifactKey(key);
    if (parts?.kind !== kind || parts.digest !== digest) {
      this.#add('misplaced', key, `the record of ${key} says ${kind} and ${digest}`);
    }
    const head = listed ?? (await this.#headOf(key));
    if (head === undefined) {
      if (await this.#isNeeded(key))
        this.#add('dangling', key, `object ${key} is not in the store`);
      return;
    }
    if (head !== sizeBytes) {
      this.#add('corrupt', key, `object ${key} has ${head} bytes, not ${sizeBytes}`);
      return;
    }
    if (this.#options.bytes) {
      const verified = await this.#deps.store.verify(object, signal);
      if (verified.ok) this.#bytesVerified += sizeBytes;
      else if (await this.#isNeeded(key)) this.#add('corrupt', key, verified.error.message);
    }
    if (object.layerUuid !== null) await this.#header(object, object.layerUuid);
  }

  /** Undefined: missing. Stored after the listing had passed, or not at all. */
  async #headOf(key: ArtifactKey): Promise<Bytes | undefined> {
    const head = await this.#deps.store.head(key);
    if (head.ok) return head.value.sizeBytes;
    if (head.error.kind === 'artifact-missing') return undefined;
    this.#add('corrupt', key, head.error.message);
    return undefined;
  }

  async #isNeeded(key: ArtifactKey): Promise<boolean> {
    const found = await this.#deps.database.read('audit-again', (tx) => findArtifacts(tx, [key]));
    return found.has(key);
  }

  async #header(object: AuditedObject, uuid: LayerUuid): Promise<void> {
    const header = await this.#deps.readHeader(object.key);
    if (header === null) return;
    if (typeof header === 'string') {
      if (await this.#isNeeded(object.key)) this.#add('corrupt', object.key, header);
      return;
    }
    const { predecessor, virtualBytes } = object;
    if (header.uuid !== uuid || header.parentUuid !== predecessor) {
      const held = `${header.uuid} on ${String(header.parentUuid)}`;
      const record = `${uuid} on ${String(predecessor)}`;
      const message = `object ${object.key} holds layer ${held}, not ${record}`;
      this.#add('misplaced', object.key, message);
    } else if (virtualBytes !== null && header.virtualBytes !== virtualBytes) {
      const message = `layer ${uuid} has ${header.virtualBytes} bytes, not ${virtualBytes}`;
      this.#add('corrupt', object.key, message);
    }
  }
}
