/** The `varve` command line: global options, and the commands of every room. */
import { Command, CommanderError } from 'commander';
import { addClaimCommands } from './claims.ts';
import { addConfigCommands } from './config.ts';
import { exitCodeOf, exitCodes, reportError } from './context.ts';
import { addDemo } from './demo.ts';
import { addFsck } from './fsck.ts';
import { addGc, addNode } from './gc.ts';
import { addDoctor } from './doctor.ts';
import { layerCommand } from './layer.ts';
import { addMigrate } from './migrate.ts';
import { addMiniVm } from './minivm.ts';
import { addSelftest } from './selftest.ts';
import { addServe } from './serve.ts';
import { addSnapshotCommands } from './snapshots.ts';
import { VERSION } from './version.ts';
import { addVmCommands } from './vms.ts';

export function buildProgram(): Command {
  const program = new Command('varve')
    .description('Captures the memory of running microVMs as thin layers, in chains that restore.')
    .version(VERSION)
    .option('--config <file>', 'configuration file (default: $VARVE_CONFIG, /etc/varve/varve.toml)')
    .option('--url <address>', 'the daemon: unix:/path or http://host:port (default: $VARVE_URL)')
    .option('--socket <path>', "the daemon's Unix socket")
    .option('--json', 'print JSON, for programs')
    .showHelpAfterError('(varve --help shows what there is)')
    .exitOverride();
  addServe(program);
  addDemo(program);
  addSelftest(program);
  addVmCommands(program);
  addSnapshotCommands(program);
  addClaimCommands(program);
  addGc(program);
  addFsck(program);
  addNode(program);
  program.addCommand(layerCommand().copyInheritedSettings(program));
  addMigrate(program);
  addDoctor(program);
  addMiniVm(program);
  addConfigCommands(program);
  return program;
}

/** Runs one command line; never throws. Sets `process.exitCode`. */
export async function runCli(argv: readonly string[]): Promise<void> {
  try {
    await buildProgram().parseAsync(argv);
  } catch (error) {
    if (error instanceof CommanderError) {
      // Help and version end here too, with 0; everything else is a usage error, already printed.
      process.exitCode = error.exitCode === 0 ? exitCodes.ok : exitCodes.usage;
      return;
    }
    reportError(error, argv.includes('--json'));
    process.exitCode = exitCodeOf(error);
  }
}
