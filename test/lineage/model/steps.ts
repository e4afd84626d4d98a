/** What the model test does, one step at a time; each takes its choices from a seed of its own. */
import { join } from 'node:path';
import type { DedupMode, ForkView, ResumeAfter } from '../../../src/capture/types.ts';
import { crashPoints } from '../../../src/crash-points.ts';
import { launchMiniVm } from '../../../src/minivm/launch.ts';
import type { MiniVm } from '../../../src/minivm/launch.ts';
import type { FaultBody } from '../../../src/minivm/control-schema.ts';
import { afterDevice, difference, PAGE, zeroPage } from './pages.ts';
import type { Fill, Random } from './pages.ts';
import { imagePages, maxChain, vmsMax, writePages, written } from './world.ts';
import type { ModelVm, World } from './world.ts';

/** How often each step comes, relative to the others. */
export const stepWeights = {
  write: 10,
  deviceWrite: 4,
  remove: 5,
  read: 2,
  look: 1,
  capture: 10,
  captureWhileWriting: 4,
  cancel: 4,
  fault: 6,
  unreadable: 2,
  diskFull: 2,
  ownerPause: 2,
  vmmDies: 1,
  fork: 3,
  replace: 2,
  detachAttach: 3,
  restore: 3,
  kill: 1,
  killInCapture: 2,
  crash: 2,
};
export type Step = keyof typeof stepWeights;

const somePages = (random: Random): number[] => {
  const count = random.pick([1, 3, 17, 60, 200]);
  if (random.chance(0.5)) {
    const first = random.below(imagePages - count);
    return Array.from({ length: count }, (_, index) => first + index);
  }
  const drawn = new Set<number>();
  while (drawn.size < count) drawn.add(random.below(imagePages));
  return [...drawn];
};

const someRequest = (random: Random) => ({
  resumeAfter: random.pick<ResumeAfter>(['publish', 'commit', 'copy']),
  dedup: random.pick<DedupMode>(['auto', 'auto', 'off', 'parent']),
});

const someFill = (random: Random): Fill => ({
  fill: random.pick(['random', 'random', 'constant', 'zero'] as const),
  // Few constants, so that a page often gets the content that it had before.
  value: random.chance(0.5) ? random.between(1, 3) : random.word(),
  words: random.pick([2, 100, 1024, 1024]),
});

async function write(vm: ModelVm, random: Random): Promise<void> {
  const pages = somePages(random);
  const how = someFill(random);
  vm.log(`  ${how.fill} ${how.words} words: ${pages.length} pages, ${pages.slice(0, 3).join(' ')}`);
  await writePages(vm, pages, how);
}

async function deviceWrite(vm: ModelVm, random: Random): Promise<void> {
  const pages = somePages(random);
  const value = random.word();
  vm.log(`  ${pages.length} pages, ${pages.slice(0, 3).join(' ')}`);
  await vm.mini.deviceWrites({ pages: { pages }, value });
  for (const page of pages) vm.image[page] = afterDevice(page, value);
}

async function remove(vm: ModelVm, random: Random): Promise<void> {
  const pageCount = random.pick([1, 8, 64, 300]);
  const firstPage = random.below(imagePages - pageCount);
  vm.log(`  ${pageCount} pages from ${firstPage}`);
  await vm.mini.removePages({ firstPage, pageCount, markDirty: random.chance(0.3) });
  vm.image.fill(zeroPage, firstPage, firstPage + pageCount);
}

async function look(vm: ModelVm): Promise<void> {
  const bytes = await vm.mini.readBytes(0, imagePages * PAGE);
  const wrong = difference(bytes, { image: vm.image });
  if (wrong !== null) throw new Error(`the guest of ${vm.id} itself: ${wrong}`);
}

/** A capture that nothing stands in the way of. */
async function capture(world: World, vm: ModelVm, random: Random): Promise<void> {
  world.expecting(vm);
  const { captureId } = await world.daemon.startCapture(vm.id, someRequest(random));
  await world.follow(captureId);
  const [ended] = await world.settle();
  if (ended?.status !== 'published') {
    throw new Error(`a capture of ${vm.id} ended as ${JSON.stringify(ended?.failure)}`);
  }
}

async function captureWhileWriting(world: World, vm: ModelVm, random: Random): Promise<void> {
  const order = somePages(random);
  const how = someFill(random);
  const after = order.map((page) => written(vm, page, how));
  world.expecting(vm, { image: [...vm.image], writing: { order, after } });
  const { captureId } = await world.daemon.startCapture(vm.id, someRequest(random));
  const following = world.follow(captureId);
  await vm.mini.program({ pages: { pages: order }, ...how, pagesPerSecond: 3000 });
  await vm.mini.programDone();
  for (const [index, page] of order.entries()) vm.image[page] = after[index] ?? zeroPage;
  await following;
  await world.settle();
}

async function cancel(world: World, vm: ModelVm, random: Random): Promise<void> {
  world.expecting(vm);
  const { captureId } = await world.daemon.startCapture(vm.id, someRequest(random));
  await world.follow(captureId, random.below(16));
  await world.daemon.send('POST', `/v1/captures/${captureId}/cancel`);
  world.counts.cancels += 1;
  await world.settle();
}

function someFault(random: Random): { rule: FaultBody; request: { pauseDeadlineMs?: number } } {
  const skip = random.pick([0, 0, 0, 1, 2]);
  if (random.chance(0.2)) {
    const on = random.pick(['snapshot-create', 'dirty'] as const);
    const when = random.pick(['before', 'done'] as const);
    return { rule: { on, action: 'hang', when }, request: { pauseDeadlineMs: 200 } };
  }
  const times = random.between(1, 3);
  if (random.chance(0.4)) {
    // A VMM that answers a change of state has made it, and one that refuses has not.
    const on = random.pick(['pause', 'resume', 'any'] as const);
    return { rule: { on, action: 'refuse', when: 'before', skip, times }, request: {} };
  }
  const on = random.pick(['snapshot-create', 'dirty', 'mappings', 'epoch', 'describe'] as const);
  const action = random.pick(['refuse', 'garbage'] as const);
  const when = random.pick(['before', 'done'] as const);
  return { rule: { on, action, when, skip, times }, request: {} };
}

async function fault(world: World, vm: ModelVm, random: Random): Promise<void> {
  const { rule, request } = someFault(random);
  await vm.mini.fault(rule);
  world.counts.faults += 1;
  world.expecting(vm);
  const body = { ...someRequest(random), ...request };
  const { captureId } = await world.daemon.startCapture(vm.id, body);
  await world.follow(captureId);
  await vm.mini.clearFaults();
  const [ended] = await world.settle();
  world.log(`  ${rule.action} ${rule.on} ${String(rule.when)}: ${outcome(ended)}`);
}

const outcome = (ended?: { status: string; failure: { kind: string } | null }): string =>
  ended === undefined ? 'nothing' : `${ended.status} ${ended.failure?.kind ?? ''}`;

async function unreadable(world: World, vm: ModelVm, random: Random): Promise<void> {
  const page = random.below(imagePages);
  if (!vm.ownerPaused) {
    await vm.mini.run({ pages: { pages: [page] }, fill: 'constant', value: 7 });
    vm.image[page] = written(vm, page, { fill: 'constant', value: 7, words: 1024 });
  }
  await vm.mini.setUnreadable(page);
  world.counts.faults += 1;
  world.expecting(vm);
  const { captureId } = await world.daemon.startCapture(vm.id, someRequest(random));
  await world.follow(captureId);
  await vm.mini.setUnreadable(page, false);
  const [ended] = await world.settle();
  world.log(`  page ${page} unreadable: ${outcome(ended)}`);
}

async function diskFull(world: World, vm: ModelVm, random: Random): Promise<void> {
  if (!world.smallDisk) return;
  world.counts.diskFull += 1;
  world.expecting(vm);
  {
    using full = world.fillDisk();
    void full;
    const { captureId } = await world.daemon.startCapture(vm.id, someRequest(random));
    await world.follow(captureId);
  }
  const [ended] = await world.settle();
  world.log(`  disk full: ${outcome(ended)}`);
}

async function ownerPause(world: World, vm: ModelVm, random: Random): Promise<void> {
  await vm.mini.pause();
  vm.ownerPaused = true;
  await capture(world, vm, random);
  await world.check();
  await vm.mini.resume();
  vm.ownerPaused = false;
}

async function vmmDies(world: World, vm: ModelVm, random: Random): Promise<void> {
  const on = random.pick(['pause', 'snapshot-create', 'dirty', 'resume', 'any'] as const);
  const when = random.pick(['before', 'done', 'answered'] as const);
  await vm.mini.fault({ on, action: 'die', when, skip: random.below(3) });
  world.counts.faults += 1;
  world.expecting(vm);
  const answer = await world.daemon.send('POST', `/v1/vms/${vm.id}/captures`, someRequest(random));
  if (answer.status < 300) await world.follow((answer.body as { captureId: string }).captureId);
  const [ended] = await world.settle();
  world.log(`  VMM dies ${when} ${on}: ${outcome(ended)}`);
  await world.dropVm(vm);
}

async function fork(world: World, vm: ModelVm, random: Random): Promise<void> {
  const wanted = random.between(1, 2);
  while (world.vms.length > 1 && world.vms.length + wanted > vmsMax) {
    await world.dropVm(random.pick(world.vms.filter((each) => each !== vm)));
  }
  const minis = new Map<string, MiniVm>();
  for (let i = 0; i < wanted; i += 1) {
    const id = world.name();
    const socketPath = join(world.folder, `${id}.sock`);
    const { dialect } = world;
    const options = { id, socketPath, dialect, start: false };
    minis.set(id, await launchMiniVm(options));
  }
  world.expecting(vm);
  const children = [...minis].map(([vmId, { socketPath }]) => ({ socketPath, vmId }));
  const made = await forkOrDie(world, vm, { ...someRequest(random), children });
  if (made === null) await world.daemon.start();
  await world.settle();
  const kept = world.kept.at(-1);
  const attached = new Set((await world.daemon.vms()).map((each) => each.vmId));
  for (const [id, mini] of minis) {
    if (made !== null && !attached.has(id as never)) throw new Error(`child ${id} failed`);
    if (attached.has(id as never) && kept !== undefined) {
      await world.addChild(id, mini, vm, kept);
      // A daemon that died between taking a child up and starting it leaves it as loaded.
      if ((await mini.info()).state === 'Paused') await mini.resume();
      world.counts.children += 1;
    } else {
      await mini[Symbol.asyncDispose]();
    }
  }
  world.counts.forks += 1;
}

/** Null where the daemon died of it. */
async function forkOrDie(world: World, vm: ModelVm, body: object): Promise<ForkView | null> {
  try {
    const made = await world.daemon.fork(vm.id, { ...body });
    for (const { failure } of made.children) {
      if (failure !== null) throw new Error(`a child failed: ${JSON.stringify(failure)}`);
    }
    return made;
  } catch (error) {
    if (!isDeath(error)) throw error;
    await world.daemon.exited();
    return null;
  }
}

const deathCodes = ['ECONNRESET', 'ECONNREFUSED', 'EPIPE', 'ENOENT'];
function isDeath(error: unknown): boolean {
  const { code, message } = error as NodeJS.ErrnoException;
  return (
    deathCodes.includes(code ?? '') ||
    ['socket hang up', 'the daemon died', 'aborted'].includes(message)
  );
}

async function replace(world: World, vm: ModelVm, random: Random): Promise<void> {
  if (world.kept.length === 0) return;
  await world.dropVm(vm);
  await world.addRestored(random, random.pick(world.kept));
}

async function detachAttach(world: World, vm: ModelVm): Promise<void> {
  await world.daemon.detach(vm.id);
  await world.attach(vm);
}

async function kill(world: World): Promise<void> {
  await world.daemon.kill();
  world.counts.kills += 1;
  await world.daemon.start();
}

/** Kills the daemon after so many events of a capture. */
async function killInCapture(world: World, vm: ModelVm, random: Random): Promise<void> {
  world.expecting(vm);
  const { captureId } = await world.daemon.startCapture(vm.id, someRequest(random));
  await world.follow(captureId, random.below(18));
  await kill(world);
  const [ended] = await world.settle();
  world.log(`  killed: ${outcome(ended)}`);
}

/** Lets the daemon kill itself at a named point, in a capture, a compaction or a fork. */
async function crash(world: World, vm: ModelVm, random: Random): Promise<void> {
  const point = random.pick(crashPoints);
  world.daemon.crashAt(point);
  if (point.startsWith('fork')) await fork(world, vm, random);
  else await crashInCaptures(world, vm, random, point.startsWith('compaction') ? maxChain + 1 : 1);
  world.log(`  ${point}: ${world.daemon.alive ? 'was not passed' : 'died'}`);
  world.counts.crashes += 1;
  // A point that was not passed must not lie in wait.
  await world.daemon.kill();
  await world.daemon.start();
  await world.settle();
}

async function crashInCaptures(
  world: World,
  vm: ModelVm,
  random: Random,
  most: number,
): Promise<void> {
  for (let i = 0; i < most && world.daemon.alive; i += 1) {
    if (!vm.ownerPaused) await write(vm, random);
    world.expecting(vm);
    try {
      const { captureId } = await world.daemon.startCapture(vm.id, someRequest(random));
      await world.follow(captureId);
      await world.settle();
    } catch (error) {
      if (!isDeath(error)) throw error;
      await world.daemon.exited();
    }
  }
}

/** One step. Throws where something is not as the model says. */
export async function takeStep(world: World, step: Step, random: Random): Promise<void> {
  if (world.vms.length === 0) await world.addVm(random);
  else if (world.vms.length < vmsMax && random.chance(0.05)) await world.addVm(random);
  const vm = random.pick(world.vms);
  world.counts.steps += 1;
  world.log(`${step} ${vm.id}`);
  switch (step) {
    case 'write':
      return write(vm, random);
    case 'deviceWrite':
      return deviceWrite(vm, random);
    case 'remove':
      return remove(vm, random);
    case 'read':
      await vm.mini.run({ pages: { pages: somePages(random) }, fill: 'read' });
      return;
    case 'look':
      return look(vm);
    case 'capture':
      return capture(world, vm, random);
    case 'captureWhileWriting':
      return captureWhileWriting(world, vm, random);
    case 'cancel':
      return cancel(world, vm, random);
    case 'fault':
      return fault(world, vm, random);
    case 'unreadable':
      return unreadable(world, vm, random);
    case 'diskFull':
      return diskFull(world, vm, random);
    case 'ownerPause':
      return ownerPause(world, vm, random);
    case 'vmmDies':
      return vmmDies(world, vm, random);
    case 'fork':
      return fork(world, vm, random);
    case 'replace':
      return replace(world, vm, random);
    case 'detachAttach':
      return detachAttach(world, vm);
    case 'restore':
      if (world.kept.length > 0) await world.restore(random.pick(world.kept));
      return;
    case 'kill':
      return kill(world);
    case 'killInCapture':
      return killInCapture(world, vm, random);
    case 'crash':
      return crash(world, vm, random);
  }
}
