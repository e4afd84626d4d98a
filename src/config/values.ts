/**
 * The value types of the configuration file: sizes and durations carry their unit in the value,
 * secrets are wrapped so that logging a configuration cannot print them.
 */
import { inspect } from 'node:util';
import { z } from 'zod';
import { bytes, KIB, millis, MIB, GIB, type Bytes, type Millis } from '../units.ts';

/** How a key's value is written, for the generated documentation. */
export const valueKinds = z.registry<{ readonly written: string }>();

const sizeUnits = { B: 1, KiB: KIB, MiB: MIB, GiB: GIB, TiB: 1024 * GIB } as const;
const sizePattern = /^(\d{1,15})(B|KiB|MiB|GiB|TiB)$/;
const durationUnits = { ms: 1, s: 1_000, m: 60_000, h: 3_600_000, d: 86_400_000 } as const;
const durationPattern = /^(\d{1,12})(ms|s|m|h|d)$/;

/** Bytes of a size such as `4MiB`; undefined where the text is not one. Only binary units exist. */
export function parseSize(text: string): Bytes | undefined {
  const match = sizePattern.exec(text);
  if (match === null) return undefined;
  const value = Number(match[1]) * sizeUnits[match[2] as keyof typeof sizeUnits];
  return Number.isSafeInteger(value) ? bytes(value) : undefined;
}

/** Milliseconds of a duration such as `30s`; undefined where the text is not one. */
export function parseDuration(text: string): Millis | undefined {
  const match = durationPattern.exec(text);
  if (match === null) return undefined;
  const value = Number(match[1]) * durationUnits[match[2] as keyof typeof durationUnits];
  return Number.isSafeInteger(value) ? millis(value) : undefined;
}

interface Bounds {
  readonly min?: string;
  readonly max?: string;
}

function boundsText(bounds: Bounds): string {
  const parts: string[] = [];
  if (bounds.min !== undefined) parts.push(`at least ${bounds.min}`);
  if (bounds.max !== undefined) parts.push(`at most ${bounds.max}`);
  return parts.length === 0 ? '' : `, ${parts.join(', ')}`;
}

function bounded<T extends number>(
  parse: (text: string) => T | undefined,
  bounds: Bounds,
  hint: string,
) {
  const limit = (text: string | undefined, otherwise: number): number =>
    text === undefined ? otherwise : (parse(text) ?? otherwise);
  const min = limit(bounds.min, 0);
  const max = limit(bounds.max, Number.MAX_SAFE_INTEGER);
  const schema = z.string({ error: hint }).transform((text, context): T => {
    const value = parse(text);
    if (value !== undefined && value >= min && value <= max) return value;
    const message =
      value === undefined
        ? `${hint}; got ${JSON.stringify(text.slice(0, 60))}`
        : `${JSON.stringify(text)} is out of range: it must be${boundsText(bounds).slice(1)}`;
    context.issues.push({ code: 'custom', input: text, message });
    return z.NEVER;
  });
  valueKinds.add(schema, { written: `${hint.replace('must be ', '')}${boundsText(bounds)}` });
  return schema;
}

/** A size in bytes, written with a binary unit. */
export const byteSize = (limits: Bounds = {}) =>
  bounded(parseSize, limits, "must be a size with a binary unit, such as '4MiB'");

/** A span of time in milliseconds, written with a unit. */
export const duration = (limits: Bounds = {}) =>
  bounded(parseDuration, limits, "must be a duration with a unit, such as '250ms', '30s' or '10m'");

/** Text that no log line, error or `inspect` prints. `reveal` is the only way to it. */
export class Secret {
  readonly #text: string;
  constructor(text: string) {
    this.#text = text;
  }
  /** The text itself. Never pass the result to a logger or an error message. */
  reveal(): string {
    return this.#text;
  }
  toString(): string {
    return '[secret]';
  }
  toJSON(): string {
    return '[secret]';
  }
  [inspect.custom](): string {
    return '[secret]';
  }
}

/** A secret text of at least `min` characters. */
export function secretText(min: number) {
  const schema = z
    .string()
    .min(min)
    .transform((text) => new Secret(text));
  valueKinds.add(schema, { written: `secret text, at least ${min} characters` });
  return schema;
}

/** An absolute path without NUL; not resolved, not checked for existence. */
export function absolutePath() {
  const schema = z
    .string()
    .regex(/^\/[^\0]*$/, { error: 'must be an absolute path' })
    .transform((path) => (path.length > 1 ? path.replace(/\/+$/, '') : path));
  valueKinds.add(schema, { written: 'absolute path' });
  return schema;
}
