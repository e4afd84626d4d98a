/**
 * Why the catalog did not do what it was asked: the database failed, or the request was refused.
 */
import { Failure } from '../result.ts';

/** The database could not be used. Nothing is known to be wrong with the request. */
export type CatalogErrorKind =
  /** No connection, or it was lost. */
  | 'catalog-unavailable'
  /** Locked by someone else for longer than `lockTimeoutMs`, or conflicts outlasted all retries. */
  | 'catalog-busy'
  /** A statement ran into `statementTimeoutMs`. */
  | 'catalog-timeout'
  | 'catalog-full'
  | 'catalog-io'
  /** A stored integer is beyond ±(2^53 − 1): reading it as a number would round it. */
  | 'catalog-integer'
  /** Rows contradict each other, or the file is damaged. */
  | 'catalog-corrupt'
  /** Written by a newer program whose changes this one cannot live with. */
  | 'catalog-newer'
  /** Migrations are missing and this program was told not to apply them. */
  | 'catalog-older'
  | 'catalog-closed';

export interface CatalogError {
  readonly kind: CatalogErrorKind;
  readonly message: string;
}

/** A database integer as a number, or `catalog-integer`: the same on every dialect. */
export function exactInteger(value: bigint): number {
  const number = Number(value);
  if (Number.isSafeInteger(number)) return number;
  const message = `the catalog holds the integer ${value}, which is beyond 2^53`;
  throw new Failure<CatalogError>({ kind: 'catalog-integer', message });
}

/** Whether the same call may succeed later without anyone changing anything. */
export const catalogRetryable = {
  'catalog-unavailable': true,
  'catalog-busy': true,
  'catalog-timeout': true,
  'catalog-full': true,
  'catalog-io': true,
  'catalog-integer': false,
  'catalog-corrupt': false,
  'catalog-newer': false,
  'catalog-older': false,
  'catalog-closed': false,
} satisfies Record<CatalogErrorKind, boolean>;

interface Refusal<Kind extends string> {
  readonly kind: Kind;
  readonly message: string;
  /** What the refusal is about: a field of the request, an id, a key. */
  readonly subject: string;
}

/**
 * The request was understood, and nothing was written. None of these is worth retrying unchanged.
 */
export type CatalogRefusal =
  | Refusal<'alias-taken'>
  | Refusal<'artifact-conflict'>
  | Refusal<'chain-too-deep'>
  | Refusal<'content-conflict'>
  | Refusal<'content-missing'>
  | Refusal<'hold-conflict'>
  | Refusal<'hold-released'>
  | Refusal<'layer-conflict'>
  | Refusal<'layer-missing'>
  | Refusal<'node-forgotten'>
  | Refusal<'node-unknown'>
  | Refusal<'request-invalid'>
  | Refusal<'snapshot-conflict'>
  | Refusal<'snapshot-invalid'>
  | Refusal<'snapshot-missing'>
  | Refusal<'snapshot-retired'>
  | Refusal<'snapshot-suspect'>
  /**
   * Never recorded, or taken back by `forgetNode` or `abandonUploads`: store the bytes again under
   * a new key.
   */
  | Refusal<'upload-missing'>
  | Refusal<'volume-conflict'>
  | Refusal<'volume-missing'>
  | Refusal<'volume-moved'>;

export type CatalogRefusalKind = CatalogRefusal['kind'];
