/**
 * Reads the configuration once: TOML, then the schema; every problem at once, with file and
 * key.
 */
import { readFileSync, statSync } from 'node:fs';
import { parse, TomlError } from 'smol-toml';
import { z } from 'zod';
import { err, ok, systemCode, type FailureDetail, type Result } from '../result.ts';
import { camelizeFrozen } from './camel.ts';
import { configSchema, type Config, type ConfigInput } from './schema.ts';

export type { Config, ConfigInput } from './schema.ts';

/** One thing wrong in a file. `key` is its dotted path, empty for the whole file. */
export interface ConfigProblem {
  readonly key: string;
  readonly message: string;
}

export interface ConfigError extends FailureDetail {
  readonly kind: 'config-unreadable' | 'config-syntax' | 'config-invalid';
  /** The file, or what the values came from. */
  readonly source: string;
  readonly problems: readonly ConfigProblem[];
}

/** Where the file is looked for when no path is given and `VARVE_CONFIG` is not set. */
export const SYSTEM_CONFIG_PATH = '/etc/varve/varve.toml';

/** No configuration is near this size; a device or a log named by mistake is. */
const FILE_BYTES_MAX = 1024 * 1024;

function failure(
  kind: ConfigError['kind'],
  source: string,
  problems: readonly ConfigProblem[],
): ConfigError {
  const lines = problems.map((p) => (p.key === '' ? p.message : `${p.key}: ${p.message}`));
  const what = problems.length === 1 ? 'one problem' : `${problems.length} problems`;
  const message = [`${source}: ${what}`, ...lines.map((line) => `  ${line}`)].join('\n');
  return { kind, source, problems, message };
}

/** Keys that the section at `path` knows; empty where it is not an object. */
function knownKeys(path: readonly PropertyKey[]): readonly string[] {
  let at: z.core.$ZodType | undefined = configSchema;
  for (const step of [...path, undefined]) {
    while (at !== undefined && !(at instanceof z.ZodObject)) {
      if (at instanceof z.ZodPipe) at = at.in;
      else if (at instanceof z.ZodPrefault || at instanceof z.ZodOptional) at = at.unwrap();
      else if (at instanceof z.ZodArray) at = at.element;
      else at = undefined;
    }
    if (at === undefined) return [];
    const shape: Record<string, z.core.$ZodType> = at.shape;
    if (step === undefined) return Object.keys(shape);
    if (typeof step === 'string') at = shape[step];
  }
  return [];
}

function toProblems(error: z.ZodError): ConfigProblem[] {
  return error.issues.flatMap((issue): ConfigProblem[] => {
    const parent = z.core.toDotPath(issue.path);
    if (issue.code !== 'unrecognized_keys') return [{ key: parent, message: issue.message }];
    const known = knownKeys(issue.path).join(', ');
    return issue.keys.map((key) => ({
      key: z.core.toDotPath([...issue.path, key]),
      message: `unknown key; known here: ${known}`,
    }));
  });
}

/** Checks values that did not come from a file; `source` names them in errors. */
export function parseConfig(raw: unknown, source: string): Result<Config, ConfigError> {
  const parsed = configSchema.safeParse(raw);
  if (parsed.success) return ok(camelizeFrozen(parsed.data));
  return err(failure('config-invalid', source, toProblems(parsed.error)));
}

function readText(path: string): Result<string, ConfigError> {
  try {
    const facts = statSync(path);
    const unfit = !facts.isFile()
      ? 'not a regular file'
      : facts.size > FILE_BYTES_MAX
        ? `larger than ${FILE_BYTES_MAX} bytes`
        : undefined;
    if (unfit === undefined) return ok(readFileSync(path, 'utf8'));
    return err(failure('config-unreadable', path, [{ key: '', message: unfit }]));
  } catch (error) {
    const message = `cannot be read: ${systemCode(error) ?? String(error)}`;
    return err(failure('config-unreadable', path, [{ key: '', message }]));
  }
}

/** Reads and checks one file. */
export function loadConfigFile(path: string): Result<Config, ConfigError> {
  const text = readText(path);
  if (!text.ok) return text;
  let raw: unknown;
  try {
    raw = parse(text.value);
  } catch (error) {
    if (!(error instanceof TomlError)) throw error;
    const message = `line ${error.line}, column ${error.column}: ${error.message.split('\n')[0]}`;
    return err(failure('config-syntax', path, [{ key: '', message }]));
  }
  return parseConfig(raw, path);
}

export interface LoadOptions {
  /** As given on the command line. */
  readonly path?: string | undefined;
  readonly env?: Readonly<Record<string, string | undefined>>;
}

/**
 * The configuration of this process: `path`, else `VARVE_CONFIG`, else the system's file if there
 * is one, else the defaults.
 */
export function loadConfig(options: LoadOptions = {}): Result<Config, ConfigError> {
  const named = options.path ?? (options.env ?? process.env)['VARVE_CONFIG'];
  if (named !== undefined && named !== '') return loadConfigFile(named);
  try {
    statSync(SYSTEM_CONFIG_PATH);
  } catch (error) {
    if (systemCode(error) === 'ENOENT') return parseConfig({}, 'the defaults');
  }
  return loadConfigFile(SYSTEM_CONFIG_PATH);
}

/** A configuration in code, for the demo and for tests; throws where it is not valid. */
export function configOf(input: ConfigInput): Config {
  const parsed = parseConfig(input, 'configuration in code');
  if (!parsed.ok) throw new Error(parsed.error.message);
  return parsed.value;
}

/** The catalog's URL with the password in it: for `openCatalog` only, never for a log. */
export function catalogUrl(catalog: Config['catalog']): string {
  if (catalog.password === undefined || !catalog.url.startsWith('postgres')) return catalog.url;
  const url = new URL(catalog.url);
  url.password = encodeURIComponent(catalog.password.reveal());
  return url.href;
}
