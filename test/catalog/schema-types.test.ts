/** The tables that the migrations make, against the types that the queries are checked with. */
import { join } from 'node:path';
import { sql } from 'kysely';
import ts from 'typescript';
import { expect, test } from 'vitest';
import type { OpenCatalog } from '../../src/catalog/open.ts';
import { onEachDialect, openTest } from './catalogs.ts';

/** `text` or `integer`, with `?` where null is allowed; by table and column. */
type Tables = Record<string, Record<string, string>>;

/** What a column is read as: the first argument of `ColumnType`, else the type itself. */
function selected(checker: ts.TypeChecker, type: ts.Type): ts.Type {
  const select = type.getProperty('__select__');
  return select === undefined ? type : checker.getTypeOfSymbol(select);
}

function kindOf(type: ts.Type): string {
  const parts = type.isUnion() ? type.types : [type];
  const isNullable = parts.some(({ flags }) => (flags & ts.TypeFlags.Null) !== 0);
  const kinds = new Set(
    parts
      .filter(({ flags }) => (flags & ts.TypeFlags.Null) === 0)
      .map((part) => {
        // Units are intersections of a primitive and a brand.
        const members = part.isIntersection() ? part.types : [part];
        if (members.some(({ flags }) => (flags & ts.TypeFlags.StringLike) !== 0)) return 'text';
        if (members.some(({ flags }) => (flags & ts.TypeFlags.NumberLike) !== 0)) return 'integer';
        return 'other';
      }),
  );
  return `${[...kinds].sort().join(' or ')}${isNullable ? '?' : ''}`;
}

function typedTables(): Tables {
  const root = join(import.meta.dirname, '../..');
  const path = join(root, 'src/catalog/schema.ts');
  const config = ts.getParsedCommandLineOfConfigFile(join(root, 'tsconfig.json'), undefined, {
    ...ts.sys,
    onUnRecoverableConfigFileDiagnostic: (problem) => {
      throw new Error(ts.flattenDiagnosticMessageText(problem.messageText, '\n'));
    },
  });
  const program = ts.createProgram([path], config?.options ?? {});
  const checker = program.getTypeChecker();
  const source = program.getSourceFile(path);
  const schema = source?.statements.find(
    (statement) => ts.isInterfaceDeclaration(statement) && statement.name.text === 'CatalogSchema',
  );
  if (schema === undefined) throw new Error('there is no CatalogSchema');
  const tables: Tables = {};
  for (const table of checker.getTypeAtLocation(schema).getProperties()) {
    const columns = checker.getTypeOfSymbol(table).getProperties();
    tables[table.name] = Object.fromEntries(
      columns.map((column) => {
        const type = selected(checker, checker.getTypeOfSymbol(column));
        return [column.name, kindOf(type)];
      }),
    );
  }
  return tables;
}

let typedOnce: Tables | undefined;

interface ColumnRow {
  readonly table_name: string;
  readonly name: string;
  readonly type: string;
  readonly nullable: string;
}

const columnsOf = {
  sqlite: sql<ColumnRow>`SELECT t.name AS table_name, c.name AS name, lower(c.type) AS type,
      CASE c."notnull" WHEN 1 THEN 'NO' ELSE 'YES' END AS nullable
    FROM sqlite_schema t JOIN pragma_table_info(t.name) c
    WHERE t.type = 'table' AND t.name NOT LIKE 'sqlite_%'`,
  postgres: sql<ColumnRow>`SELECT table_name, column_name AS name, data_type AS type,
      is_nullable AS nullable
    FROM information_schema.columns WHERE table_schema = 'public'`,
};

async function madeTables({ database, dialect }: OpenCatalog): Promise<Tables> {
  const { rows } = await database.read('schema', (tx) => columnsOf[dialect].execute(tx.db));
  const tables: Tables = {};
  for (const { table_name: table, name, type, nullable } of rows) {
    const kind = type === 'bigint' ? 'integer' : type;
    (tables[table] ??= {})[name] = `${kind}${nullable === 'YES' ? '?' : ''}`;
  }
  return tables;
}

onEachDialect('the schema', (dialect) => {
  test('has the tables, columns, kinds and nulls that the table types say', async () => {
    const catalog = await openTest(dialect);
    const typed = (typedOnce ??= typedTables());
    expect(Object.keys(typed).length).toBeGreaterThan(15);
    expect(await madeTables(catalog)).toEqual(typed);
    await catalog.close();
  });
});
