/** Commands on VMs and captures: they ask the daemon. */
import { randomUUID } from 'node:crypto';
import { InvalidArgumentError, Option, type Command } from 'commander';
import type { CaptureResult, CaptureView, ForkView, VmView } from '../capture/types.ts';
import { precopyRoundsMax } from '../config/pipeline.schema.ts';
import { parseDuration } from '../config/values.ts';
import { clientFrom, segment, type Client } from './client.ts';
import { exitCodes, globalOptions, print } from './context.ts';
import { progressLine } from './progress.ts';
import { countText, msText, sizeText, table, timeText } from './table.ts';

const durationMs = (text: string): number => {
  const parsed = parseDuration(text);
  if (parsed === undefined) throw new InvalidArgumentError("use a duration such as '500ms'.");
  return parsed;
};

const roundCount = (text: string): number => {
  const rounds = /^\d+$/.test(text) ? Number(text) : Infinity;
  if (rounds > precopyRoundsMax) {
    throw new InvalidArgumentError(`use a number from 0 to ${precopyRoundsMax}.`);
  }
  return rounds;
};

function vmRows(vms: readonly VmView[]): string {
  if (vms.length === 0) return 'no VM is attached';
  const head = ['VM', 'STATE', 'PID', 'DIALECT', 'TRACKING', 'EPOCH', 'CHAIN', 'CAPTURE'];
  const rows = vms.map((vm) => [
    vm.vmId,
    vm.pausedByUs ? `${vm.state}, paused` : vm.state,
    String(vm.pid),
    `${vm.dialect} ${vm.vmmVersion}`,
    vm.trackingMode,
    String(vm.epoch),
    String(vm.chainDepth),
    vm.captureId ?? '-',
  ]);
  return table(head, rows);
}

function captureRows(captures: readonly CaptureView[]): string {
  if (captures.length === 0) return 'there are no captures';
  const head = ['CAPTURE', 'VM', 'STATUS', 'CREATED', 'FROZEN', 'PAGES', 'LAYER', 'SNAPSHOT'];
  const rows = captures.map((capture) => [
    capture.captureId,
    capture.vmId,
    capture.failure === null ? capture.status : `${capture.status} (${capture.failure.kind})`,
    timeText(capture.createdAtMs),
    capture.result === null ? '-' : msText(capture.result.frozenMs),
    capture.result === null ? '-' : countText(capture.result.selectedPages),
    capture.result === null ? '-' : sizeText(capture.result.layerBytes),
    capture.result?.snapshotId ?? '-',
  ]);
  return table(head, rows);
}

function shadowLines(shadow: CaptureResult['shadow']): string[] {
  if (shadow === null) return [];
  if (shadow.compared === 'nothing') return [`  shadow    not compared: ${shadow.reason}`];
  const { both, primaryOnly, shadowOnly } = shadow;
  return [
    `  shadow    ${countText(both)} pages seen by both, ${countText(primaryOnly)} by the VMM ` +
      `alone, ${countText(shadowOnly)} missed by it`,
  ];
}

function verifyLines({ verify }: Partial<CaptureResult>): string[] {
  if (verify == null) return [];
  if (verify.compared === 'nothing') return [`  verified  nothing: ${verify.reason}`];
  const { pages, differing } = verify;
  const found = differing === 0 ? 'all as in the layers' : `${countText(differing)} HAD BEEN LOST`;
  return [`  verified  ${countText(pages)} pages that no dirty set named: ${found}`];
}

function precopyLines(result: CaptureResult): string[] {
  if (result.precopyRounds === 0) return [];
  return [
    `  ahead     ${countText(result.precopiedPages)} pages copied before the pause, in rounds: ` +
      `${countText(result.precopyRounds)}; ${sizeText(result.supersededBytes)} copied again`,
  ];
}

/** What one capture did, with a line per stage. */
export function captureText(capture: CaptureView): string {
  const { result, failure } = capture;
  const lines = [`capture ${capture.captureId} of ${capture.vmId}: ${capture.status}`];
  if (failure !== null) lines.push(`  ${failure.kind}: ${failure.message}`);
  if (result !== null) {
    lines.push(
      `  snapshot  ${result.snapshotId}${result.alias === null ? '' : ` (${result.alias})`}`,
      ...(result.aliasProblem === null ? [] : [`  no alias  ${result.aliasProblem.message}`]),
      `  layer     ${result.layer} on ${result.predecessor ?? 'nothing'}, ` +
        `${sizeText(result.layerBytes)}, chain of ${result.chainDepth}`,
      `  pages     ${countText(result.selectedPages)} selected (${result.selection}), ` +
        `${countText(result.deduplicatedPages)} as in the parent, ` +
        `${countText(result.zeroPages)} zero`,
      ...precopyLines(result),
      ...shadowLines(result.shadow),
      ...verifyLines(result),
      `  time      ${msText(result.frozenMs)} frozen, ${msText(result.totalMs)} in all, ` +
        `resumed after ${result.resumeAfter}`,
    );
  }
  if (capture.stages.length > 0) {
    const rows = capture.stages.map((stage) => [
      stage.stage,
      msText(stage.endedMs - stage.startedMs),
      msText(stage.frozenMs),
      countText(stage.items),
      sizeText(stage.bytes),
    ]);
    lines.push('', table(['STAGE', 'TIME', 'FROZEN', 'ITEMS', 'BYTES'], rows));
  }
  return lines.join('\n');
}

/** Follows a capture to its end, showing its stage on a terminal. */
async function follow(client: Client, started: CaptureView): Promise<CaptureView> {
  using line = progressLine();
  const path = `/v1/captures/${segment(started.captureId)}`;
  for await (const { event, data } of client.events(`${path}/events`)) {
    if (event !== 'stage') continue;
    const { stage, state } = data as { stage: string; state: string };
    if (state === 'started') line.show(`capture ${started.captureId}: ${stage}`);
  }
  return await client.call<CaptureView>('GET', path);
}

function addVms(program: Command): void {
  program
    .command('attach')
    .description('attach a VM by its API socket')
    .argument('<socket>', 'API socket of the VMM')
    .option('--id <name>', "name of the VM (default: the VMM's own id)")
    .addOption(
      new Option('--tracking-mode <mode>', 'where the dirty set comes from').choices([
        'mincore',
        'dirty',
        'pagemap',
      ]),
    )
    .option('--launch-parent <snapshot>', 'the snapshot that the process was started from')
    .action(async (socketPath: string, options: AttachOptions, command: Command) => {
      const vm = await clientFrom(command).call<VmView>('POST', '/v1/vms', {
        socketPath,
        vmId: options.id,
        trackingMode: options.trackingMode,
        launchParent: options.launchParent,
      });
      print(command, vm, () => vmRows([vm]));
    });
  program
    .command('detach')
    .description('detach a VM; it goes on running')
    .argument('<vm>')
    .action(async (vm: string, _options, command: Command) => {
      await clientFrom(command).call('DELETE', `/v1/vms/${segment(vm)}`);
      print(command, { detached: vm }, () => `${vm} is detached`);
    });
  program
    .command('vms')
    .description('list attached VMs')
    .action(async (_options, command: Command) => {
      const { vms } = await clientFrom(command).call<{ vms: VmView[] }>('GET', '/v1/vms');
      print(command, vms, () => vmRows(vms));
    });
}

interface AttachOptions {
  readonly id?: string;
  readonly trackingMode?: string;
  readonly launchParent?: string;
}

interface CaptureOptions {
  readonly resumeAfter?: string;
  readonly dedup?: string;
  readonly alias?: string;
  readonly pauseDeadline?: number;
  readonly precopyRounds?: number;
  readonly verify?: boolean;
  readonly idempotencyKey?: string;
  readonly wait: boolean;
}

function withCaptureOptions(command: Command): Command {
  return command
    .addOption(
      new Option('--resume-after <step>', 'which step the VM stays paused for').choices([
        'publish',
        'commit',
        'copy',
      ]),
    )
    .addOption(
      new Option('--dedup <mode>', 'compare with the parent').choices(['auto', 'off', 'parent']),
    )
    .option('--alias <name>', 'name the snapshot, for good')
    .option('--pause-deadline <duration>', 'longest frozen time', durationMs)
    .option('--precopy-rounds <n>', 'rounds of copying before the pause, at most', roundCount)
    .option('--verify', 'compare every page of the VM with its layers, too')
    .option('--idempotency-key <key>', 'repeat a request safely (default: a new one)');
}

const captureBody = (options: CaptureOptions) => ({
  resumeAfter: options.resumeAfter,
  dedup: options.dedup,
  alias: options.alias,
  pauseDeadlineMs: options.pauseDeadline,
  precopyRounds: options.precopyRounds,
  verify: options.verify,
});

const keyHeader = (options: CaptureOptions) => ({
  'idempotency-key': options.idempotencyKey ?? randomUUID(),
});

function addCaptures(program: Command): void {
  withCaptureOptions(program.command('capture'))
    .description('capture a VM and wait for the snapshot')
    .argument('<vm>')
    .option('--no-wait', 'return once the capture has started')
    .action(async (vm: string, options: CaptureOptions, command: Command) => {
      const client = clientFrom(command);
      const path = `/v1/vms/${segment(vm)}/captures`;
      const body = captureBody(options);
      const started = await client.call<CaptureView>('POST', path, body, keyHeader(options));
      const capture = options.wait ? await follow(client, started) : started;
      print(command, capture, () => captureText(capture));
      if (capture.status === 'aborted') process.exitCode = exitCodes.failed;
    });
  program
    .command('captures')
    .description('list captures, or show one')
    .argument('[capture]')
    .option('--vm <vm>', 'only those of one VM')
    .action(async (id: string | undefined, options: { vm?: string }, command: Command) => {
      const client = clientFrom(command);
      if (id !== undefined) {
        const capture = await client.call<CaptureView>('GET', `/v1/captures/${segment(id)}`);
        print(command, capture, () => captureText(capture));
        return;
      }
      const of = options.vm === undefined ? '' : `/vms/${segment(options.vm)}`;
      const path = `/v1${of}/captures`;
      const { captures } = await client.call<{ captures: CaptureView[] }>('GET', path);
      print(command, captures, () => captureRows(captures));
    });
  program
    .command('cancel')
    .description('abort a capture that has not committed')
    .argument('<capture>')
    .action(async (id: string, _options, command: Command) => {
      const path = `/v1/captures/${segment(id)}/cancel`;
      const capture = await clientFrom(command).call<CaptureView>('POST', path);
      print(command, capture, () => captureText(capture));
    });
}

function addFork(program: Command): void {
  withCaptureOptions(program.command('fork'))
    .description('capture a VM and start children from the capture')
    .argument('<vm>')
    .requiredOption('--child <socket...>', 'API sockets of VMMs that have not booted')
    .action(async (vm: string, options: CaptureOptions & { child: string[] }, command: Command) => {
      const body = {
        ...captureBody(options),
        children: options.child.map((socketPath) => ({ socketPath })),
      };
      const path = `/v1/vms/${segment(vm)}/forks`;
      const client = clientFrom(command);
      const fork = await client.call<ForkView>('POST', path, body, keyHeader(options));
      print(command, fork, () => {
        const rows = fork.children.map((child) => [
          child.socketPath,
          child.vm?.vmId ?? '-',
          child.failure?.message ?? 'started',
        ]);
        return `${captureText(fork.capture)}\n\n${table(['CHILD', 'VM', 'OUTCOME'], rows)}`;
      });
      const failed = fork.children.some((child) => child.failure !== null);
      if (failed) process.exitCode = exitCodes.failed;
    });
}

export function addVmCommands(program: Command): void {
  addVms(program);
  addCaptures(program);
  addFork(program);
}

/** Whether output is for a program. */
export const isJson = (command: Command): boolean => globalOptions(command).json === true;
