import { Failure, err, type FailureDetail, type Result } from '../result.ts';

/**
 * Every way a VMM can fail us. Stable: the API, the metrics and the job records carry these names.
 */
export type VmmErrorKind =
  | 'vmm-unreachable'
  | 'vmm-not-a-vmm'
  | 'vmm-timeout'
  | 'vmm-refused'
  | 'vmm-bad-answer'
  | 'vm-exited'
  | 'vm-ran'
  | 'vm-replaced'
  | 'tracking-off'
  | 'tracking-unsupported'
  | 'permission-denied'
  | 'layout-changed'
  | 'layout-unknown'
  | 'memory-file-bad'
  | 'vmm-file-bad'
  | 'swap-on';

export interface VmmError {
  readonly kind: VmmErrorKind;
  /** One sentence: what failed, where, and where there is one the way out. */
  readonly message: string;
  readonly socketPath?: string;
  /** HTTP status of a refusal. */
  readonly status?: number;
  /** The VMM's own words for a refusal. */
  readonly fault?: string;
  /** The field of a bad answer, as a path such as `ranges[3].length`. */
  readonly field?: string;
  /** Name of the error number (`ECONNREFUSED`, `EPERM`, …), where a system call failed. */
  readonly code?: string;
}

/**
 * Whether the same request may succeed later without anybody changing anything. The VM's exit, a
 * refusal and a bad answer do not pass by themselves.
 */
export const vmmErrorRetryable = {
  'vmm-unreachable': true,
  'vmm-not-a-vmm': false,
  'vmm-timeout': true,
  'vmm-refused': false,
  'vmm-bad-answer': false,
  'vm-exited': false,
  'vm-ran': true,
  'vm-replaced': false,
  'tracking-off': false,
  'tracking-unsupported': false,
  'permission-denied': false,
  'layout-changed': false,
  'layout-unknown': false,
  'memory-file-bad': false,
  'vmm-file-bad': false,
  'swap-on': false,
} satisfies Record<VmmErrorKind, boolean>;

export function vmmError(
  kind: VmmErrorKind,
  message: string,
  more: Omit<VmmError, 'kind' | 'message'> = {},
): VmmError {
  return { kind, message, ...more };
}

/** A bad answer, naming the field and what is wrong with it. */
export function badAnswer(what: string, field: string, problem: string): VmmError {
  const at = field === '' ? '' : ` ${field}`;
  return { kind: 'vmm-bad-answer', message: `${what}:${at} ${problem}`, field };
}

/** Throws inside the room; caught at its edges by `caught`. */
export function fail(error: VmmError, cause?: unknown): never {
  throw new Failure<VmmError>(error, cause);
}

/** Runs `body`; a thrown `Failure<VmmError>` becomes an error value, everything else goes on up. */
export async function caught<T>(
  body: () => Promise<Result<T, VmmError>>,
): Promise<Result<T, VmmError>> {
  try {
    return await body();
  } catch (error) {
    const detail: FailureDetail | null =
      error instanceof Failure ? (error as Failure).detail : null;
    if (detail !== null && isVmmError(detail)) return err(detail);
    throw error;
  }
}

export function isVmmError(detail: { readonly kind: string }): detail is VmmError {
  return detail.kind in vmmErrorRetryable;
}

/** The value, or throws the error as a `Failure`. */
export function orFail<T>(result: Result<T, VmmError>): T {
  if (!result.ok) fail(result.error);
  return result.value;
}
