/**
 * Structured logs: one JSON object a line, with the ids that tie it to a capture, a VM and a
 * trace.
 */
import { pino, type DestinationStream, type Logger } from 'pino';

export type { Logger } from 'pino';

export interface LogOptions {
  readonly level: string;
  readonly nodeId: string;
  /** Default: standard output. */
  readonly destination?: DestinationStream | undefined;
}

/** Ids that a log line carries. All optional: a line has those that apply to it. */
export interface LogIds {
  readonly capture?: string | undefined;
  readonly vm?: string | undefined;
  readonly snapshot?: string | undefined;
  readonly trace?: string | undefined;
}

const redacted = ['authorization', 'token', 'password'].flatMap((key) => [
  key,
  `*.${key}`,
  `*.*.${key}`,
]);

/**
 * The process's logger. Anything called authorization, token or password is printed as
 * [secret].
 */
export function createLogger(options: LogOptions): Logger {
  const settings = {
    level: options.level,
    base: { node: options.nodeId },
    timestamp: () => `,"time":"${new Date().toISOString()}"`,
    formatters: { level: (label: string) => ({ level: label }) },
    redact: { paths: redacted, censor: '[secret]' },
  };
  return options.destination === undefined ? pino(settings) : pino(settings, options.destination);
}

/** The same logger with ids on every line. */
export function logFor(logger: Logger, ids: LogIds): Logger {
  const known = Object.entries(ids).filter(([, value]) => value !== undefined);
  return logger.child(Object.fromEntries(known));
}

/** A logger that writes nothing, for code that runs outside the daemon. */
export const silentLogger = (): Logger => pino({ level: 'silent' });
