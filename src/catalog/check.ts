/**
 * What the catalog takes from callers, checked before anything is written. All identifiers are
 * plain ASCII.
 */
import { parseArtifactKey } from '../artifact/store.ts';
import type { StoredArtifact } from '../artifact/store.ts';
import { Failure } from '../result.ts';
import { CHAIN_LAYERS_MAX, isDigest } from '../units.ts';
import type { LayerUuid } from '../units.ts';
import type { HoldRequest, ListRequest, NewUpload, PublishRequest } from './catalog.ts';
import type { SuspectRequest } from './catalog.ts';
import type { CatalogRefusal, CatalogRefusalKind } from './errors.ts';

const HEADS_MAX = 64;
const ARTIFACTS_MAX = 64;
const UPLOADS_MAX = 512;
export const PAGE_ROWS_MAX = 1000;

/** Lowercase, so that no two names differ by case alone. */
const namePattern = /^[a-z0-9](?:[a-z0-9_-]|\.(?!\.)){0,127}$/;
const rolePattern = /^[a-z0-9](?:[a-z0-9_:-]|\.(?!\.)){0,63}$/;
/** VMMs allow capitals in the names of VMs and hosts. */
const foreignNamePattern = /^[A-Za-z0-9](?:[A-Za-z0-9_:-]|\.(?!\.)){0,127}$/;
const uuidPattern = /^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$/;
const NIL_UUID = '00000000-0000-0000-0000-000000000000';

/** Ends the transaction with an answer. */
export function refuse(kind: CatalogRefusalKind, subject: string, message: string): never {
  throw new Failure<CatalogRefusal>({ kind, subject, message });
}

const invalid = (field: string, message: string): never =>
  refuse('request-invalid', field, `${field}: ${message}`);

/** Never more of a hostile value than fits a log line. */
export const quote = (value: unknown): string => JSON.stringify(String(value).slice(0, 80));

function pattern(field: string, value: unknown, allowed: RegExp, what: string): void {
  if (typeof value !== 'string' || value.length > 200 || !allowed.test(value)) {
    invalid(field, `${quote(value)} is not ${what}`);
  }
}

/** The rule of all names that users choose, in words. */
export const NAME_RULE =
  'a name of 1 to 128 lowercase letters, digits, "-", "_" and single dots, that begins with a letter ' +
  'or digit';

export const checkName = (field: string, value: unknown): void =>
  pattern(field, value, namePattern, NAME_RULE);

export const checkForeignName = (field: string, value: unknown): void =>
  pattern(
    field,
    value,
    foreignNamePattern,
    'a name of 1 to 128 letters, digits, "-", "_", ":" and single dots',
  );

export const isName = (value: string): boolean => value.length <= 128 && namePattern.test(value);

export function checkUuid(field: string, value: unknown): void {
  pattern(field, value, uuidPattern, 'a lowercase UUID');
  if (value === NIL_UUID) invalid(field, 'the nil UUID names no layer');
}

export function checkInteger(field: string, value: unknown, max = Number.MAX_SAFE_INTEGER): void {
  if (typeof value !== 'number' || !Number.isSafeInteger(value) || value < 0 || value > max) {
    invalid(field, `${quote(value)} is not an integer from 0 to ${max}`);
  }
}

export function checkUpload(field: string, upload: NewUpload): void {
  if (typeof upload.digest !== 'string' || !isDigest(upload.digest)) {
    invalid(`${field}.digest`, `${quote(upload.digest)} is not "sha256:" and 64 hex digits`);
  }
  checkInteger(`${field}.sizeBytes`, upload.sizeBytes);
}

export function checkArtifact(field: string, artifact: StoredArtifact): void {
  checkUpload(field, artifact);
  const parts = parseArtifactKey(String(artifact.key));
  if (parts === undefined) invalid(`${field}.key`, `${quote(artifact.key)} is not an artifact key`);
  else if (parts.kind !== artifact.kind || parts.digest !== artifact.digest) {
    invalid(`${field}.key`, `${artifact.key} does not match its kind or digest`);
  }
}

export function checkUploads(uploads: readonly NewUpload[]): void {
  if (uploads.length === 0 || uploads.length > UPLOADS_MAX) {
    invalid('artifacts', `${uploads.length} is not 1 to ${UPLOADS_MAX}`);
  }
  uploads.forEach((upload, index) => checkUpload(`artifacts[${index}]`, upload));
}

export function checkSuspects({ layers, reason }: SuspectRequest): void {
  if (layers.length === 0 || layers.length > CHAIN_LAYERS_MAX * HEADS_MAX) {
    invalid('layers', `${layers.length} is not 1 to ${CHAIN_LAYERS_MAX * HEADS_MAX}`);
  }
  layers.forEach((uuid, index) => checkUuid(`layers[${index}]`, uuid));
  checkText('reason', reason);
}

/** Form only; what the database says is checked in the transaction. */
export function checkPublish(request: PublishRequest): void {
  checkName('snapshotId', request.snapshotId);
  checkName('contentId', request.contentId);
  checkForeignName('sourceVm', request.sourceVm);
  checkForeignName('nodeId', request.nodeId);
  checkInteger('createdAtMs', request.createdAtMs);
  if (request.alias !== undefined) {
    checkName('alias', request.alias);
    if (request.alias === request.snapshotId) invalid('alias', 'is the id of the snapshot itself');
  }
  if (request.hold !== undefined) {
    checkName('hold.holdId', request.hold.holdId);
    checkForeignName('hold.purpose', request.hold.purpose);
  }
  checkArtifact('manifest', request.manifest);
  if (request.manifest.kind !== 'manifest') invalid('manifest.kind', 'is not "manifest"');
  checkLayers(request);
  checkHeads(request);
  if (request.artifacts.length > ARTIFACTS_MAX) invalid('artifacts', 'too many');
  request.artifacts.forEach(({ name, artifact }, index) => {
    pattern(`artifacts[${index}].name`, name, rolePattern, 'a name such as "vm-state"');
    checkArtifact(`artifacts[${index}].artifact`, artifact);
  });
  unique(
    'artifacts',
    request.artifacts.map(({ name }) => name),
  );
  unique('artifact keys', [
    request.manifest.key,
    ...request.layers.map(({ artifact }) => artifact.key),
    ...request.artifacts.map(({ artifact }) => artifact.key),
  ]);
}

function unique(field: string, values: readonly string[]): void {
  const seen = new Set<string>();
  for (const value of values) {
    if (seen.has(value)) invalid(field, `${quote(value)} occurs twice`);
    seen.add(value);
  }
}

function checkLayers(request: PublishRequest): void {
  if (request.layers.length > CHAIN_LAYERS_MAX * HEADS_MAX) invalid('layers', 'too many');
  const listed = new Set<LayerUuid>();
  const all = new Set(request.layers.map(({ uuid }) => uuid));
  request.layers.forEach(({ uuid, predecessor, virtualBytes, artifact }, index) => {
    const field = `layers[${index}]`;
    checkUuid(`${field}.uuid`, uuid);
    checkInteger(`${field}.virtualBytes`, virtualBytes);
    checkArtifact(`${field}.artifact`, artifact);
    if (artifact.kind !== 'layer') invalid(`${field}.artifact.kind`, 'is not "layer"');
    if (listed.has(uuid)) invalid(`${field}.uuid`, `${uuid} occurs twice`);
    if (predecessor !== null) {
      checkUuid(`${field}.predecessor`, predecessor);
      if (all.has(predecessor) && !listed.has(predecessor)) {
        invalid(`${field}.predecessor`, `${predecessor} comes later in the list, or is itself`);
      }
    }
    listed.add(uuid);
  });
}

/** Every new layer must be under a head: nothing would ever collect one that is not. */
function checkHeads(request: PublishRequest): void {
  if (request.heads.length > HEADS_MAX) invalid('heads', `more than ${HEADS_MAX}`);
  request.heads.forEach(({ role, layer }, index) => {
    pattern(`heads[${index}].role`, role, rolePattern, 'a role such as "memory" or "drive:<id>"');
    checkUuid(`heads[${index}].layer`, layer);
  });
  unique(
    'heads',
    request.heads.map(({ role }) => role),
  );
  const under = new Set<LayerUuid>(request.heads.map(({ layer }) => layer));
  for (const { uuid, predecessor } of [...request.layers].reverse()) {
    if (!under.has(uuid)) invalid('layers', `${uuid} is under none of the heads`);
    if (predecessor !== null) under.add(predecessor);
  }
}

export function checkHold(request: HoldRequest): void {
  checkName('holdId', request.holdId);
  checkForeignName('nodeId', request.nodeId);
  checkForeignName('purpose', request.purpose);
  if ('snapshot' in request.target) checkName('target.snapshot', request.target.snapshot);
  else checkName('target.content', request.target.content);
}

export function checkList(request: ListRequest): void {
  if (request.limit !== undefined) {
    checkInteger('limit', request.limit, PAGE_ROWS_MAX);
    if (request.limit === 0) invalid('limit', 'is 0');
  }
  if (request.sourceVm !== undefined) checkForeignName('sourceVm', request.sourceVm);
  if (request.alias !== undefined) checkName('alias', request.alias);
  if (request.createdFromMs !== undefined) checkInteger('createdFromMs', request.createdFromMs);
  if (request.createdBeforeMs !== undefined) {
    checkInteger('createdBeforeMs', request.createdBeforeMs);
  }
}

/** Free text for people: printable, one paragraph. */
export function checkText(field: string, value: unknown): void {
  if (typeof value !== 'string' || value.length === 0 || value.length > 1000) {
    invalid(field, 'is not 1 to 1000 characters of text');
  } else if (/[\u0000-\u0008\u000b-\u001f\u007f]/.test(value)) {
    invalid(field, 'has control characters');
  }
}

export function checkAddress(field: string, value: unknown): void {
  checkText(field, value);
}
