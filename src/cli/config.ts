/** `varve config`: look at a configuration without starting anything. */
import type { Command } from 'commander';
import { renderDefaultToml } from '../config/docs.ts';
import { loadConfigFile } from '../config/load.ts';
import { Failure } from '../result.ts';
import { configFrom, print } from './context.ts';

export function addConfigCommands(program: Command): void {
  const config = program.command('config').description('check or print the configuration');
  config
    .command('check')
    .description('check a file; prints every problem')
    .argument('<file>')
    .action((file: string, _options, command: Command) => {
      const loaded = loadConfigFile(file);
      if (!loaded.ok) throw new Failure(loaded.error);
      print(command, { ok: true, file }, () => `${file} is fine`);
    });
  config
    .command('show')
    .description('print the configuration in effect; secrets are hidden')
    .action((_options, command: Command) => {
      const shown = configFrom(command);
      print(command, shown, () => JSON.stringify(shown, null, 2));
    });
  config
    .command('defaults')
    .description('print a file with every key at its default')
    .action(() => {
      process.stdout.write(renderDefaultToml());
    });
}
