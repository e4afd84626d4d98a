/** What the captures refuse in the same words wherever they do. */
import { err, type Result } from '../result.ts';
import type { CaptureId, VmId } from '../units.ts';
import type { ServiceError } from './types.ts';

/** Without whatever else an error of a room below carries. */
export function refused(
  error: ServiceError,
  facts?: ServiceError['facts'],
): Result<never, ServiceError> {
  const { kind, message } = error;
  return err(facts === undefined ? { kind, message } : { kind, message, facts });
}

export function runningFacts(error: {
  readonly kind: string;
  readonly runningCaptureId?: CaptureId;
}): ServiceError['facts'] {
  return error.runningCaptureId === undefined
    ? undefined
    : { runningCaptureId: error.runningCaptureId };
}

export const vmUnknown = (id: VmId): ServiceError => ({
  kind: 'vm-unknown',
  message: `no VM ${id} is attached`,
});

export const stoppingError = (): ServiceError => ({
  kind: 'daemon-stopping',
  message: 'the daemon is stopping and takes no more captures',
});
