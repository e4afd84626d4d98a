/**
 * `config/varve.toml` and `docs/ops/config.md`, from the schema. A test fails when they are
 * stale.
 */
import { z } from 'zod';
import { configSchema } from './schema.ts';
import { valueKinds } from './values.ts';

interface Key {
  readonly name: string;
  readonly written: string;
  /** Undefined: the key may be left out and has no fixed default. */
  readonly initial: unknown;
  readonly description: string;
}

interface Section {
  /** Dotted path, as in the header of a TOML table. */
  readonly path: string;
  readonly description: string;
  readonly keys: readonly Key[];
  /** An array of tables: shown as an example, commented out. */
  readonly repeated: boolean;
}

type Schema = z.core.$ZodType;

function describeType(schema: Schema): string {
  const known = valueKinds.get(schema);
  if (known !== undefined) return known.written;
  if (schema instanceof z.ZodPrefault || schema instanceof z.ZodOptional) {
    return describeType(schema.unwrap());
  }
  if (schema instanceof z.ZodPipe) return describeType(schema.in);
  if (schema instanceof z.ZodEnum) return schema.options.map((o) => `"${o}"`).join(' or ');
  if (schema instanceof z.ZodLiteral) return JSON.stringify(schema.value);
  if (schema instanceof z.ZodUnion) return schema.options.map(describeType).join(' or ');
  if (schema instanceof z.ZodArray) return `list of ${describeType(schema.element)}`;
  if (schema instanceof z.ZodBoolean) return 'true or false';
  if (schema instanceof z.ZodNumber) {
    const noun = schema.format === 'safeint' ? 'integer' : 'number';
    const isOpen = (schema.maxValue ?? Infinity) >= Number.MAX_SAFE_INTEGER;
    return isOpen ? noun : `${noun}, ${schema.minValue ?? 0} to ${schema.maxValue ?? 0}`;
  }
  if (schema instanceof z.ZodString) return 'text';
  return 'value';
}

function objectOf(schema: Schema): z.ZodObject | undefined {
  if (schema instanceof z.ZodObject) return schema;
  if (schema instanceof z.ZodPrefault || schema instanceof z.ZodOptional) {
    return objectOf(schema.unwrap());
  }
  return schema instanceof z.ZodPipe ? objectOf(schema.in) : undefined;
}

const arrayOf = (schema: Schema): z.ZodArray | undefined => {
  if (schema instanceof z.ZodArray) return schema;
  return schema instanceof z.ZodPrefault ? arrayOf(schema.unwrap()) : undefined;
};

function descriptionOf(schema: Schema): string {
  const own = z.globalRegistry.get(schema)?.description;
  if (own !== undefined) return own;
  if (schema instanceof z.ZodPrefault || schema instanceof z.ZodOptional) {
    return descriptionOf(schema.unwrap());
  }
  return '';
}

function walk(path: string, schema: Schema, repeated: boolean): Section[] {
  const object = objectOf(schema);
  if (object === undefined) return [];
  const keys: Key[] = [];
  const below: Section[] = [];
  for (const [name, field] of Object.entries(object.shape) as [string, Schema][]) {
    const inner = path === '' ? name : `${path}.${name}`;
    const array = arrayOf(field);
    if (objectOf(field) !== undefined) {
      below.push(...walk(inner, field, false));
    } else if (array !== undefined && objectOf(array.element) !== undefined) {
      const [table] = walk(inner, array.element, true);
      if (table !== undefined) below.push({ ...table, description: descriptionOf(field) });
    } else {
      const initial = field instanceof z.ZodPrefault ? field.def.defaultValue : undefined;
      const description = descriptionOf(field);
      keys.push({ name, written: describeType(field), initial, description });
    }
  }
  const own = { path, description: descriptionOf(schema), keys, repeated };
  return path === '' ? below : [own, ...below];
}

/** Every section of the file, in its order. */
const sections = (): readonly Section[] => walk('', configSchema, false);

function wrapped(text: string, prefix: string): string[] {
  const lines: string[] = [];
  let line = prefix;
  for (const word of text.split(' ')) {
    if (line.length + word.length + 1 > 98 && line !== prefix) {
      lines.push(line);
      line = prefix;
    }
    line += line === prefix ? word : ` ${word}`;
  }
  return [...lines, line];
}

const tomlValue = (value: unknown): string =>
  Array.isArray(value) ? `[${value.map(tomlValue).join(', ')}]` : JSON.stringify(value);

/** The file with every key at its default, as it ships in `config/varve.toml`. */
export function renderDefaultToml(): string {
  const out = [
    '# Every key of Varve with its default. Generated from src/config/schema.ts by `npm run docs`;',
    '# explained in docs/ops/config.md. Lines that begin with `#` and a key have no fixed default.',
  ];
  for (const section of sections()) {
    if (section.keys.length === 0) continue;
    out.push('', ...wrapped(section.description, '# '));
    out.push(section.repeated ? `# [[${section.path}]]` : `[${section.path}]`);
    for (const key of section.keys) {
      out.push(...wrapped(key.description, '# '));
      const isSet = key.initial !== undefined && !section.repeated;
      out.push(isSet ? `${key.name} = ${tomlValue(key.initial)}` : `# ${key.name} =`);
    }
  }
  return `${out.join('\n')}\n`;
}

const cell = (text: string): string => text.replaceAll('|', '\\|');

/** The reference page, `docs/ops/config.md`. */
export function renderConfigPage(): string {
  const out = [
    '# Configuration',
    '',
    'Generated from `src/config/schema.ts` by `npm run docs`; do not edit.',
    '',
    '`varve --config FILE`, else `$VARVE_CONFIG`, else `/etc/varve/varve.toml` if it ' +
      'exists, else the',
    'defaults below. The file is TOML. Unknown keys are refused; all problems are ' +
      'reported at once, each',
    'with its key. Sizes are written with a binary unit (`4MiB`), durations with a ' +
      'unit (`30s`). The file',
    'is read once, at start. `varve config check FILE` checks one without starting anything.',
  ];
  for (const section of sections()) {
    if (section.keys.length === 0) continue;
    const title = section.repeated ? `[[${section.path}]]` : `[${section.path}]`;
    out.push('', `## \`${title}\``, '', section.description, '');
    out.push('| key | value | default | meaning |', '| --- | --- | --- | --- |');
    for (const key of section.keys) {
      const initial = key.initial === undefined ? '' : `\`${cell(tomlValue(key.initial))}\``;
      out.push(
        `| \`${key.name}\` | ${cell(key.written)} | ${initial} | ${cell(key.description)} |`,
      );
    }
  }
  return `${out.join('\n')}\n`;
}
