/** Expected failures are values; bugs are assertions that crash. */
export type Result<T, E> =
  { readonly ok: true; readonly value: T } | { readonly ok: false; readonly error: E };

export const ok = <T>(value: T): Result<T, never> => ({ ok: true, value });
export const err = <E>(error: E): Result<never, E> => ({ ok: false, error });

/** What every expected failure carries: a stable kind, and one sentence saying what and where. */
export interface FailureDetail {
  readonly kind: string;
  readonly message: string;
}

/** The one class that generators and deep calls throw for an expected failure. */
export class Failure<E extends FailureDetail = FailureDetail> extends Error {
  override readonly name = 'Failure';
  readonly detail: E;
  constructor(detail: E, cause?: unknown) {
    super(detail.message, cause === undefined ? undefined : { cause });
    this.detail = detail;
  }
}

/** Ends a `switch` over a union: adding a member makes this a type error. */
export function unreachable(value: never): never {
  throw new Error(`unreachable: ${JSON.stringify(value)}`);
}

/** Throws when what must hold does not. For bugs, never for input. */
export function assert(condition: boolean, what: string): asserts condition {
  if (!condition) throw new Error(`assertion failed: ${what}`);
}

/** The error number's name (`ENOSPC`, `ENOENT`, …) of a Node system error, if it is one. */
export function systemCode(error: unknown): string | undefined {
  if (error instanceof Error && 'code' in error && typeof error.code === 'string') {
    return error.code;
  }
  return undefined;
}
