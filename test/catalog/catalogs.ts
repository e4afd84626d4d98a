/** Real catalogs for tests: one suite, run on every dialect that this machine has. */
import { randomUUID } from 'node:crypto';
import { mkdtemp, rm } from 'node:fs/promises';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, test } from 'vitest';
import { newArtifact } from '../../src/artifact/store.ts';
import type { StoredArtifact } from '../../src/artifact/store.ts';
import type { Catalog, NewUpload, PublishRequest } from '../../src/catalog/catalog.ts';
import { openCatalog } from '../../src/catalog/open.ts';
import type { CatalogConfig, OpenCatalog } from '../../src/catalog/open.ts';
import type { Result } from '../../src/result.ts';
import { bytes, contentId, digest, layerUuid, nodeId, snapshotId } from '../../src/units.ts';
import type { LayerUuid } from '../../src/units.ts';
import { TestPostgres, fastFolder, postgresMissing } from '../../tools/postgres-server.ts';

export interface TestDialect {
  readonly name: 'sqlite' | 'postgres';
  /** A new, empty database, and its URL. */
  readonly newUrl: () => Promise<string>;
}

/**
 * Runs `suite` for each dialect; one that is not available is skipped, with the reason in its name.
 */
export function onEachDialect(what: string, suite: (dialect: TestDialect) => void): void {
  describe(`${what} on SQLite`, () => {
    const folders: string[] = [];
    afterAll(() => Promise.all(folders.map((path) => rm(path, { recursive: true, force: true }))));
    suite({
      name: 'sqlite',
      newUrl: async () => {
        const folder = await mkdtemp(join(fastFolder, 'varve-catalog-'));
        folders.push(folder);
        return `sqlite:${join(folder, 'catalog.db')}`;
      },
    });
  });
  const missing = postgresMissing();
  if (missing !== null) {
    describe.skip(`${what} on PostgreSQL: ${missing}`, () => {
      test('skipped', () => undefined);
    });
    return;
  }
  describe(`${what} on PostgreSQL`, () => {
    let server: TestPostgres | undefined;
    beforeAll(async () => {
      server = await TestPostgres.start();
    });
    afterAll(() => server?.[Symbol.asyncDispose]());
    suite({
      name: 'postgres',
      newUrl: () => server?.newDatabase() ?? Promise.reject(new Error('no server')),
    });
  });
}

/** A machine that stops for minutes must not turn a wait into a failure. */
export const patient = { lockTimeoutMs: 600_000 };

export async function openTest(
  dialect: TestDialect,
  config: Partial<CatalogConfig> = {},
): Promise<OpenCatalog> {
  return value(await openCatalog({ ...patient, url: await dialect.newUrl(), ...config }));
}

/** The value, or a failed test that shows the error. */
export function value<T>(result: Result<T, { kind: string; message: string }>): T {
  if (result.ok) return result.value;
  throw new Error(`${result.error.kind}: ${result.error.message}`);
}

/** The error's kind, or a failed test. */
export function errorKind<E extends { readonly kind: string }>(
  result: Result<unknown, E>,
): E['kind'] {
  if (!result.ok) return result.error.kind;
  throw new Error(`expected an error, got ${JSON.stringify(result.value)}`);
}

export const NODE = nodeId('node-1');
export const uuid = (): LayerUuid => layerUuid(randomUUID());
export const someDigest = () =>
  digest(`sha256:${randomUUID().replaceAll('-', '')}${randomUUID().replaceAll('-', '')}`);

export const upload = (kind: NewUpload['kind'] = 'layer', sizeBytes = 4096): NewUpload => ({
  kind,
  digest: someDigest(),
  sizeBytes: bytes(sizeBytes),
});

/** An artifact that was never recorded. */
export const stray = (kind: NewUpload['kind'] = 'layer'): StoredArtifact =>
  newArtifact(upload(kind));

export interface Shape {
  /** Layers to add on top of `on`, bottom to top. Default 1. */
  readonly layers?: number;
  readonly on?: LayerUuid | null;
  readonly alias?: string;
  readonly sourceVm?: string;
  readonly createdAtMs?: number;
  readonly node?: typeof NODE;
}

/**
 * Records the uploads of, and describes, a snapshot with one memory head. Its bytes are nowhere.
 */
export async function prepare(catalog: Catalog, shape: Shape = {}): Promise<PublishRequest> {
  const count = shape.layers ?? 1;
  const node = shape.node ?? NODE;
  const artifacts = value(
    await catalog.recordUpload({
      nodeId: node,
      artifacts: [
        upload('manifest'),
        upload('vm-state'),
        ...Array.from({ length: count }, () => upload()),
      ],
    }),
  );
  const [manifest, vmState, ...layerArtifacts] = artifacts;
  if (manifest === undefined || vmState === undefined) throw new Error('no uploads');
  let below = shape.on ?? null;
  const layers = layerArtifacts.map((artifact) => {
    const layer = { uuid: uuid(), predecessor: below, virtualBytes: bytes(2 ** 30), artifact };
    below = layer.uuid;
    return layer;
  });
  return {
    snapshotId: snapshotId(`snap-${randomUUID()}`),
    contentId: contentId(`content-${randomUUID()}`),
    sourceVm: shape.sourceVm ?? 'vm-1',
    nodeId: node,
    createdAtMs: shape.createdAtMs ?? 1_700_000_000_000,
    manifest,
    layers,
    heads: below === null ? [] : [{ role: 'memory', layer: below }],
    artifacts: [{ name: 'vm-state', artifact: vmState }],
    alias: shape.alias,
  };
}

export async function publishOne(catalog: Catalog, shape: Shape = {}): Promise<PublishRequest> {
  const request = await prepare(catalog, shape);
  value(await catalog.publish(request));
  return request;
}

/** The memory head's layer. */
export function headOf(request: PublishRequest): LayerUuid {
  const head = request.heads[0];
  if (head === undefined) throw new Error('no head');
  return head.layer;
}
