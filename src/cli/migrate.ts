/** `varve migrate`: bring the catalog's schema up to date, or say what is missing. */
import type { Command } from 'commander';
import { openDatabase } from '../catalog/open.ts';
import { migrate, migrationStatus } from '../catalog/migrator.ts';
import { migrations } from '../../migrations/index.ts';
import { configFrom, exitCodes, print } from './context.ts';
import { catalogOptions } from './parts.ts';

export function addMigrate(program: Command): void {
  program
    .command('migrate')
    .description('apply missing catalog migrations')
    .option('--check', 'only say what is missing; exit status 1 if anything is')
    .action(async (options: { check?: boolean }, command: Command) => {
      const database = await openDatabase(catalogOptions(configFrom(command)));
      try {
        const { pending } = await migrationStatus(database, migrations);
        const isCheck = options.check === true;
        if (!isCheck) await migrate(database, migrations);
        const applied = isCheck ? [] : pending;
        print(command, { pending: isCheck ? pending : [], applied }, () => {
          if (pending.length === 0) return 'the catalog is up to date';
          return `${isCheck ? 'missing' : 'applied'}: ${pending.join(', ')}`;
        });
        if (isCheck && pending.length > 0) process.exitCode = exitCodes.failed;
      } finally {
        await database.close();
      }
    });
}
