/** The daemon's side of `varve-supervisor`: started before the first capture, closed after the last. */
import { join, resolve } from 'node:path';
import type { ServiceDeps } from '../capture/service.ts';
import { systemClock } from '../clock.ts';
import type { Config } from '../config/load.ts';
import { takeReport } from '../lineage/supervisor-report.ts';
import { Supervisor, supervisorPath } from '../lineage/supervisor.ts';
import type { Logger } from '../observability/log.ts';
import type { Cleanups } from '../pipeline/cleanups.ts';
import { Failure, type FailureDetail } from '../result.ts';

export type Supervise = (cleanups: Cleanups) => Promise<ServiceDeps['supervisor']>;

/** For runs whose VMs die with them. */
export const unsupervised: Supervise = () =>
  Promise.resolve({ paused: () => undefined, resumed: () => undefined });

/** Throws `Failure` where the helper is not built or cannot be started. */
export function supervised(config: Config, logger: Logger): Supervise {
  return async (cleanups) => {
    const { state } = config.paths;
    const reportPath = join(state, 'supervisor.report');
    const started = await Supervisor.start({
      executable: executable(),
      lockPath: join(state, 'supervisor.lock'),
      reportPath,
      clock: systemClock,
      onRestart: (failure) => logger.warn({ failure }, 'the supervisor is started again'),
    });
    if (!started.ok) throw new Failure(started.error);
    const supervisor = started.value;
    cleanups.useAsync(supervisor);
    const report = await takeReport(reportPath);
    if (!report.ok) logger.warn({ failure: report.error }, 'a supervisor report was not read');
    const before = report.ok ? report.value : [];
    const told = (outcome: { ok: true } | { ok: false; error: FailureDetail }): void => {
      if (!outcome.ok) logger.error({ failure: outcome.error }, 'a pause is not supervised');
    };
    return {
      paused: ({ vmId, client, identity }) => {
        const { pid, startTimeTicks } = identity;
        const socketPath = resolve(client.socketPath);
        void supervisor.paused({ vmId, socketPath, pid, startTimeTicks }).then(told);
      },
      resumed: ({ vmId }) => void supervisor.resumed(vmId).then(told),
      wasResumed: ({ pid, startTimeTicks }) =>
        before.some((vm) => vm.pid === pid && vm.startTimeTicks === startTimeTicks),
    };
  };
}

function executable(): string {
  try {
    return supervisorPath();
  } catch (error) {
    throw new Failure({ kind: 'supervisor-unavailable', message: (error as Error).message });
  }
}
