/** What all commands share: global options, output, exit codes. */
import type { Command } from 'commander';
import { loadConfig, type Config } from '../config/load.ts';
import { Failure, type FailureDetail } from '../result.ts';
import type { Interrupted } from './signals.ts';

/** Exit codes, the same for all commands. Documented in docs/ops/cli.md. */
export const exitCodes = {
  ok: 0,
  /** It was tried and failed: a capture aborted, a check found something. */
  failed: 1,
  /** The command line or the configuration is wrong; nothing was tried. */
  usage: 2,
  /** The daemon cannot be reached. */
  unreachable: 3,
  /** What was named does not exist (any more). */
  missing: 4,
  /** Refused in this state, or busy: another try may succeed. */
  refused: 5,
  /** The token is missing, unknown, or lacks the scope; or a path is outside the allowed roots. */
  forbidden: 6,
} as const;

export interface GlobalOptions {
  readonly config?: string | undefined;
  readonly url?: string | undefined;
  readonly socket?: string | undefined;
  readonly json?: boolean | undefined;
}

export const globalOptions = (command: Command): GlobalOptions => command.optsWithGlobals();

/** The configuration that the global options name. Throws `Failure` with every problem. */
export function configFrom(command: Command): Config {
  const loaded = loadConfig({ path: globalOptions(command).config });
  if (!loaded.ok) throw new Failure(loaded.error);
  return loaded.value;
}

/** An answer of the daemon that is a problem document. */
export class ProblemAnswer extends Error {
  override readonly name = 'ProblemAnswer';
  readonly status: number;
  readonly code: string;
  readonly document: Readonly<Record<string, unknown>>;
  constructor(status: number, document: Readonly<Record<string, unknown>>) {
    super(typeof document['detail'] === 'string' ? document['detail'] : `status ${status}`);
    this.status = status;
    this.code = typeof document['code'] === 'string' ? document['code'] : 'internal';
    this.document = document;
  }
}

function exitOfStatus(status: number): number {
  if (status === 401 || status === 403) return exitCodes.forbidden;
  if (status === 404 || status === 410) return exitCodes.missing;
  if (status === 409 || status === 429 || status === 503) return exitCodes.refused;
  return status === 400 || status === 422 ? exitCodes.usage : exitCodes.failed;
}

const exitOfKind: Readonly<Record<string, number>> = {
  'config-invalid': exitCodes.usage,
  'config-syntax': exitCodes.usage,
  'config-unreadable': exitCodes.usage,
  'daemon-unreachable': exitCodes.unreachable,
  'snapshot-missing': exitCodes.missing,
  'snapshot-retired': exitCodes.missing,
  usage: exitCodes.usage,
};

/** The exit code for what a command threw. */
export function exitCodeOf(error: unknown): number {
  if (error instanceof ProblemAnswer) return exitOfStatus(error.status);
  if (error instanceof Failure) {
    const { kind, exitCode } = (error as Failure<FailureDetail & Partial<Interrupted>>).detail;
    if (exitCode !== undefined) return exitCode;
    return exitOfKind[kind] ?? exitCodes.failed;
  }
  return exitCodes.failed;
}

/** One line for people, or a document for programs, on standard error. */
export function reportError(error: unknown, json: boolean): void {
  if (json) {
    const document = error instanceof ProblemAnswer ? error.document : plainError(error);
    process.stderr.write(`${JSON.stringify({ error: document })}\n`);
    return;
  }
  const code = error instanceof ProblemAnswer ? ` (${error.code})` : '';
  const isExpected = error instanceof ProblemAnswer || error instanceof Failure;
  const stack = error instanceof Error ? (error.stack ?? error.message) : String(error);
  const text = isExpected ? `${error.message}${code}` : stack;
  process.stderr.write(`varve: ${text}\n`);
}

function plainError(error: unknown): object {
  if (error instanceof Failure) return (error as Failure).detail;
  return { kind: 'internal', message: error instanceof Error ? error.message : String(error) };
}

/** Prints a result: as JSON for programs, else with the given function for people. */
export function print(command: Command, value: unknown, forPeople: () => string): void {
  const text = globalOptions(command).json === true ? JSON.stringify(value, null, 2) : forPeople();
  process.stdout.write(text.endsWith('\n') ? text : `${text}\n`);
}
