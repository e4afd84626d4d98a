import { Failure, systemCode, type FailureDetail, type Result } from '../result.ts';

/** The value, or a `Failure` with the error. */
export function orThrow<T, E extends FailureDetail>(result: Result<T, E>): T {
  if (result.ok) return result.value;
  throw new Failure(result.error);
}

const codes: Readonly<Record<string, string>> = {
  ENOSPC: 'state-no-space',
  EDQUOT: 'state-no-space',
  EROFS: 'state-read-only',
  EACCES: 'state-permission',
  EPERM: 'state-permission',
};

/** What a caller is told of anything that was thrown: a stable kind and one sentence. */
export function failureOf(error: unknown): FailureDetail {
  if (error instanceof Failure) {
    const { kind, message } = error.detail as FailureDetail;
    return { kind, message };
  }
  const code = systemCode(error);
  const message = error instanceof Error ? error.message : String(error);
  if (code !== undefined) return { kind: codes[code] ?? 'state-io', message };
  return { kind: 'internal', message };
}
