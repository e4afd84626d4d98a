/** The lists that `npm run test:mutation` works through still fit the sources. */
import { existsSync, readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { expect, test } from 'vitest';

interface Mutant {
  readonly what: string;
  readonly file: string;
  readonly find: string;
  readonly replace: string;
  /** What vitest is given: files and folders of tests, then `-t` with a name. */
  readonly tests?: readonly string[];
  /** Of a file of `native/`: facts of the native tests whose name holds this. */
  readonly native?: string;
}

const root = join(import.meta.dirname, '../..');
const rooms = readdirSync(import.meta.dirname).filter((name) => name.endsWith('.json'));

const mutantsOf = (room: string): readonly Mutant[] =>
  JSON.parse(readFileSync(join(import.meta.dirname, room), 'utf8')) as Mutant[];

test.each(rooms)('each text that a mutant of %s replaces occurs once in its file', (room) => {
  const mutants = mutantsOf(room);
  expect(mutants.length).toBeGreaterThan(0);
  const wrong = mutants.flatMap(({ what, file, find, replace }) => {
    const occurs = readFileSync(join(root, file), 'utf8').split(find).length - 1;
    return occurs === 1 && find !== replace ? [] : [`${file}: ${occurs} times: ${what}`];
  });
  expect(wrong).toEqual([]);
});

test.each(rooms)('each mutant of %s has a name of its own and tests that are there', (room) => {
  const mutants = mutantsOf(room);
  expect(new Set(mutants.map(({ what }) => what)).size).toBe(mutants.length);
  for (const { what, tests, native, file } of mutants) {
    expect(native !== undefined, what).toBe(file.startsWith('native/'));
    if (native !== undefined) continue;
    const filter = tests?.indexOf('-t') ?? -1;
    const paths = filter < 0 ? tests : tests?.slice(0, filter);
    expect(
      paths?.every((path) => existsSync(join(root, path))),
      what,
    ).toBe(true);
    expect(paths?.length, what).toBeGreaterThan(0);
  }
});
