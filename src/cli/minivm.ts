/**
 * `varve minivm`: a VM to try Varve with where there is no Firecracker. A real process with the
 * Firecracker API and a guest that writes where it is told to; see docs/minivm.md.
 */
import { createHash } from 'node:crypto';
import { createReadStream } from 'node:fs';
import { join } from 'node:path';
import { InvalidArgumentError, Option, type Command } from 'commander';
import { MiniVmClient, MiniVmError } from '../minivm/client.ts';
import { launchMiniVm, type LaunchOptions } from '../minivm/launch.ts';
import { parseSize } from '../config/values.ts';
import { Failure } from '../result.ts';
import { MIB, PAGE_BYTES } from '../units.ts';
import { print } from './context.ts';
import { countText, sizeText } from './table.ts';

function memoryMib(text: string): number {
  const size = parseSize(text) ?? 0;
  if (size < MIB || size > 64 * 1024 * MIB || size % MIB !== 0) {
    throw new InvalidArgumentError('use whole MiB from 1MiB to 64GiB, such as 256MiB.');
  }
  return size / MIB;
}

interface PageRange {
  readonly firstPage: number;
  readonly pageCount: number;
}

function pageRange(text: string): PageRange {
  const match = /^(\d{1,15}):(\d{1,15})$/.exec(text);
  const [firstPage, pageCount] = [Number(match?.[1]), Number(match?.[2])];
  if (match === null || pageCount === 0) {
    throw new InvalidArgumentError('use FIRST:COUNT, such as 1000:500.');
  }
  return { firstPage, pageCount };
}

function word(text: string): number {
  const value = Number(text);
  if (!/^\d+$/.test(text) || value > 0xffffffff) {
    throw new InvalidArgumentError('use a number from 0 to 4294967295.');
  }
  return value;
}

interface StartOptions {
  readonly memory: number;
  readonly dialect: NonNullable<LaunchOptions['dialect']>;
  readonly backend: NonNullable<LaunchOptions['backend']>;
  readonly id?: string;
  readonly track: boolean;
  readonly restore?: string;
  readonly boot: boolean;
}

/** Resolves with the first signal that asks this process to end. */
const askedToEnd = (): Promise<NodeJS.Signals> =>
  new Promise((resolve) => {
    for (const signal of ['SIGINT', 'SIGTERM', 'SIGHUP'] as const) process.once(signal, resolve);
  });

/** Runs a small VM in the foreground until a signal, or until it ends by itself. */
async function start(socketPath: string, options: StartOptions, command: Command): Promise<void> {
  const ended = askedToEnd();
  const { restore } = options;
  await using vm = await asFailure(() =>
    launchMiniVm({
      socketPath,
      memoryMib: options.memory,
      dialect: options.dialect,
      backend: options.backend,
      track: options.track,
      start: options.boot,
      ...(options.id === undefined ? {} : { id: options.id }),
      ...(restore === undefined
        ? {}
        : {
            restore: {
              memoryPath: join(restore, 'memory'),
              snapshotPath: join(restore, 'vm-state'),
              resume: true,
            },
          }),
    }),
  );
  const { pid, backend } = vm;
  print(command, { socketPath, pid, backend }, () =>
    [
      `a small VM listens on ${socketPath} (pid ${pid}, guest: ${backend}); Ctrl-C ends it`,
      `next: varve attach ${socketPath}`,
    ].join('\n'),
  );
  const exited = vm.exited.then(({ code, signal }) => {
    const message = `the small VM ended by itself (${signal ?? `status ${String(code)}`})`;
    throw new Failure({ kind: 'minivm-ended', message });
  });
  exited.catch(() => undefined);
  await Promise.race([ended, exited]);
}

/** What the small VM refuses, and what its socket says, are no bugs of ours. */
async function asFailure<T>(work: () => Promise<T>): Promise<T> {
  try {
    return await work();
  } catch (error) {
    if (!(error instanceof Error)) throw error;
    const kind = error instanceof MiniVmError ? 'minivm-refused' : 'minivm-unreachable';
    throw new Failure({ kind, message: error.message }, error);
  }
}

async function write(
  socketPath: string,
  options: { pages: PageRange; value: number },
  command: Command,
): Promise<void> {
  const { pages, value } = options;
  const client = new MiniVmClient(socketPath);
  const done = await asFailure(() => client.run({ pages, value }));
  print(command, { ...pages, value, counters: done }, () => {
    const last = pages.firstPage + pages.pageCount - 1;
    return `the guest wrote ${countText(pages.pageCount)} pages, ${pages.firstPage} to ${last}`;
  });
}

/** Bytes that are asked of the VM at a time. */
const sumBytes = 16 * MIB;

async function sum(path: string, options: { file: boolean }, command: Command): Promise<void> {
  const hash = createHash('sha256');
  let imageBytes = 0;
  if (options.file) {
    for await (const chunk of createReadStream(path)) {
      hash.update(chunk as Buffer);
      imageBytes += (chunk as Buffer).length;
    }
  } else {
    const client = new MiniVmClient(path);
    ({ imageBytes } = await asFailure(() => client.info()));
    for (let at = 0; at < imageBytes; at += sumBytes) {
      const length = Math.min(sumBytes, imageBytes - at);
      hash.update(await asFailure(() => client.readBytes(at, length)));
    }
  }
  const sha256 = hash.digest('hex');
  print(command, { sha256, imageBytes }, () => `${sha256}  ${path}`);
}

async function show(socketPath: string, _options: object, command: Command): Promise<void> {
  const info = await asFailure(() => new MiniVmClient(socketPath).info());
  print(command, info, () =>
    [
      `${info.dialect}, ${info.state}, ${sizeText(info.imageBytes)}, guest: ${info.backend}`,
      `dirty tracking: ${info.tracking ? 'on' : 'off'}`,
      ...info.regions.map(
        (region) =>
          `pages ${region.imageOffset / PAGE_BYTES} to ` +
          `${(region.imageOffset + region.bytes) / PAGE_BYTES - 1} at guest address ` +
          `0x${BigInt(region.guestAddress).toString(16)}`,
      ),
    ].join('\n'),
  );
}

const example = `
Example:
  varve minivm start /run/varve/vms/a.sock --memory 256MiB &
  varve attach /run/varve/vms/a.sock --id a
  varve minivm write /run/varve/vms/a.sock --pages 1000:500
  varve capture a --alias first
  varve restore first --output /tmp/first
  varve minivm sum /run/varve/vms/a.sock; varve minivm sum --file /tmp/first/memory`;

export function addMiniVm(program: Command): void {
  const minivm = program
    .command('minivm')
    .description(
      'a VM to try Varve with, without Firecracker: its guest writes where it is told to',
    )
    .addHelpText('after', example);
  minivm
    .command('start')
    .description('run one in the foreground, until Ctrl-C')
    .argument('<socket>', 'where its Firecracker API listens; must not exist')
    .option('--memory <size>', 'guest memory', memoryMib, 128)
    .addOption(
      new Option('--dialect <name>', 'which Firecracker API it speaks')
        .choices(['firecracker', 'aenv', 'e2b'])
        .default('firecracker'),
    )
    .addOption(
      new Option('--backend <name>', 'what the guest is')
        .choices(['auto', 'kvm', 'thread'])
        .default('auto'),
    )
    .option('--id <name>', 'instance id')
    .option('--no-track', 'boot without dirty tracking')
    .option('--no-boot', 'do not boot: a snapshot can be loaded, or a fork started')
    .option('--restore <folder>', 'start from the files of "varve restore" instead of booting')
    .action(start);
  minivm
    .command('write')
    .description('have the guest write pages, and wait until it has')
    .argument('<socket>')
    .requiredOption('--pages <first:count>', 'which pages of 4 KiB', pageRange)
    .option('--value <n>', 'seed of what it writes: the same gives the same bytes', word, 1)
    .action(write);
  minivm
    .command('sum')
    .description('SHA-256 of all its memory, or of a restored memory file')
    .argument('<socket-or-file>')
    .option('--file', 'it is a memory file', false)
    .action(sum);
  minivm.command('show').description('what it is').argument('<socket>').action(show);
}
