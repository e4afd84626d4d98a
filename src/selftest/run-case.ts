/**
 * One case: a VM of its own and a daemon of its own, three captures while the guest writes, the last
 * of them of the VM paused by its owner. What that one reads must be what the VMM itself saves of
 * the same moment, and a VM restored from it must go on counting, as must the source.
 */
import { mkdir, rm } from 'node:fs/promises';
import { join } from 'node:path';
import type { AttachRequest, CaptureResult, Captures, CaptureView } from '../capture/types.ts';
import { Cleanups } from '../pipeline/cleanups.ts';
import { Failure, type FailureDetail } from '../result.ts';
import { vmId, type SnapshotId } from '../units.ts';
import type { Case } from './cases.ts';
import { compareMemory } from './compare.ts';
import { Firecracker, valueOf, type VmFiles } from './firecracker.ts';
import type { GuestSettings } from './guest.ts';

/** What a case needs of a daemon. */
export interface SelftestDaemon extends AsyncDisposable {
  readonly captures: Captures;
  /** Writes what a VMM loads into the folder. Throws `Failure`. */
  restore(snapshot: SnapshotId, folder: string, signal: AbortSignal): Promise<VmFiles>;
}

export interface CaseDeps {
  readonly binary: string;
  /** Made here, and removed at the end. Short: socket paths may not be longer than 107 bytes. */
  readonly folder: string;
  readonly openDaemon: (stateFolder: string, socketRoot: string) => Promise<SelftestDaemon>;
  /** Told what is being done. */
  readonly onStep: (step: string) => void;
}

/** What one capture of a running VM cost. */
export interface CaptureCost {
  readonly frozenMs: number;
  readonly totalMs: number;
  readonly selectedPages: number;
  readonly layerBytes: number;
  /** The longest time that the guest did not run, as it saw it, milliseconds. */
  readonly stoodStillMs: number;
}

export interface CaseOutcome {
  readonly name: string;
  /**
   * `exact`: equal in every page, and all guests went on. `refused`: rightly, and the guest went on.
   * `differs`: what was restored is not what the VMM had. `failed`: anything else.
   */
  readonly verdict: 'exact' | 'refused' | 'differs' | 'failed' | 'skipped';
  /** Null where it is exact. */
  readonly reason: { readonly kind: string; readonly message: string } | null;
  readonly captures: readonly CaptureCost[];
  readonly seconds: number;
}

/** Enough pages to tell places apart, few enough for a slow machine. */
const guestSettings: GuestSettings = { pages: 256, first: 6_000, pauseMs: 20, seed: 7, ranges: [] };

/** Rounds of the guest between two captures. */
const roundsBetween = 2;

/** Never rejects but with the signal's reason. */
export async function runCase(one: Case, deps: CaseDeps, signal: AbortSignal) {
  const startedMs = performance.now();
  const captures: CaptureCost[] = [];
  const ended = (verdict: CaseOutcome['verdict'], reason: FailureDetail | null): CaseOutcome => {
    const seconds = (performance.now() - startedMs) / 1000;
    const told = reason === null ? null : { kind: reason.kind, message: reason.message };
    return { name: one.name, verdict, reason: told, captures, seconds };
  };
  try {
    await using trial = new Trial(one, deps, signal, captures);
    return ended(...(await trial.run()));
  } catch (error) {
    signal.throwIfAborted();
    if (error instanceof Failure) return ended('failed', (error as Failure).detail);
    const message = error instanceof Error ? (error.stack ?? error.message) : String(error);
    return ended('failed', { kind: 'internal', message });
  } finally {
    await rm(deps.folder, { recursive: true, force: true });
  }
}

type Ending = readonly [CaseOutcome['verdict'], FailureDetail | null];

class Trial implements AsyncDisposable {
  readonly #case: Case;
  readonly #deps: CaseDeps;
  readonly #signal: AbortSignal;
  readonly #costs: CaptureCost[];
  readonly #cleanups = new Cleanups();
  #started = 0;

  constructor(one: Case, deps: CaseDeps, signal: AbortSignal, costs: CaptureCost[]) {
    this.#case = one;
    this.#deps = deps;
    this.#signal = signal;
    this.#costs = costs;
  }

  async run(): Promise<Ending> {
    const { folder, openDaemon } = this.#deps;
    await mkdir(folder, { recursive: true });
    const daemon = await openDaemon(join(folder, 'd'), folder);
    this.#cleanups.useAsync(daemon);
    const running = this.#case.origin === 'fresh' ? this.#bootFresh : this.#bootRestored;
    const vm = await this.#start();
    const refused = await refusal(() => running.call(this, daemon, vm), this.#case);
    if (refused !== null) {
      if (vm.guest.last === null && this.#case.origin === 'fresh') await this.#bootAnyway(vm);
      return this.#refused(vm, refused);
    }
    const late = await refusal(() => this.#captureRunning(daemon, vm), this.#case);
    if (late !== null) return this.#refused(vm, late);
    return this.#prove(daemon, vm);
  }

  /** A refusal may not do the guest any harm. */
  async #refused(vm: Firecracker, reason: FailureDetail): Promise<Ending> {
    this.#step('the guest goes on after the refusal');
    await this.#rounds(vm, roundsBetween);
    return ['refused', reason];
  }

  async #bootAnyway(vm: Firecracker): Promise<void> {
    const info = valueOf(await vm.client.info(this.#signal));
    if (info.state === 'Not started') await vm.boot(this.#signal);
  }

  #step(step: string): void {
    this.#deps.onStep(`${this.#case.name}: ${step}`);
  }

  async #start(): Promise<Firecracker> {
    this.#started += 1;
    const folder = join(this.#deps.folder, `v${this.#started}`);
    const vm = await Firecracker.start(this.#deps.binary, folder, this.#signal);
    this.#cleanups.useAsync(vm);
    return vm;
  }

  async #rounds(vm: Firecracker, count: number): Promise<void> {
    await vm.rounds(count, this.#signal);
    const { badPages } = vm.guest;
    if (badPages === 0) return;
    const message = `the guest in ${vm.folder} found ${badPages} pages that it had not left so`;
    throw new Failure({ kind: 'guest-memory-wrong', message });
  }

  #attach(daemon: SelftestDaemon, vm: Firecracker, more: Partial<AttachRequest> = {}) {
    const { socketPath } = vm.client;
    return daemon.captures
      .attach({ socketPath, vmId: 'vm', trackingMode: this.#case.mode, ...more })
      .then(valueOf);
  }

  /** Attached before it boots, but where tracking is to stay off: an attach would turn it on. */
  async #bootFresh(daemon: SelftestDaemon, vm: Firecracker): Promise<void> {
    this.#step('booting the guest');
    await vm.configure(this.#case, guestSettings, this.#signal);
    if (this.#case.tracked) await this.#attach(daemon, vm);
    await vm.boot(this.#signal);
    await this.#rounds(vm, 1);
    if (!this.#case.tracked) await this.#attach(daemon, vm);
  }

  /** From a snapshot that Varve made of another VM. */
  async #bootRestored(daemon: SelftestDaemon, vm: Firecracker): Promise<void> {
    this.#step('making a snapshot to start from');
    const source = await this.#start();
    await source.configure({ ...this.#case, tracked: true }, guestSettings, this.#signal);
    await this.#attach(daemon, source, { vmId: 'source', trackingMode: 'dirty' });
    await source.boot(this.#signal);
    await this.#rounds(source, 1);
    const { snapshotId } = await this.#capture(daemon, 'source', { resumeAfter: 'copy' });
    valueOf(await daemon.captures.detach(vmId('source')));
    await source[Symbol.asyncDispose]();
    const folder = join(this.#deps.folder, 'launch');
    const files = await daemon.restore(snapshotId, folder, this.#signal);
    await vm.load(files, this.#case.tracked, this.#signal);
    await this.#attach(daemon, vm, { launchParent: snapshotId });
    await vm.resume(this.#signal);
    await this.#rounds(vm, 1);
  }

  async #capture(
    daemon: SelftestDaemon,
    vm: string,
    request: Parameters<Captures['startCapture']>[1],
  ): Promise<CaptureResult> {
    const started = valueOf(await daemon.captures.startCapture(vmId(vm), request));
    return resultOf(await daemon.captures.waitFor(started.captureId, this.#signal));
  }

  #request() {
    const { resumeAfter, precopyRounds } = this.#case;
    // A large guest on a slow disk takes its time; the guest's own clock says how long.
    return { resumeAfter, precopyRounds, pauseDeadlineMs: 300_000 } as const;
  }

  async #captureRunning(daemon: SelftestDaemon, vm: Firecracker): Promise<void> {
    for (const name of ['first', 'second']) {
      this.#step(`the ${name} capture`);
      await this.#rounds(vm, roundsBetween);
      vm.guest.takeLongestUs();
      const result = await this.#capture(daemon, 'vm', this.#request());
      await this.#rounds(vm, 1);
      this.#costs.push(costOf(result, vm.guest.takeLongestUs()));
    }
    await this.#rounds(vm, roundsBetween);
  }

  async #prove(daemon: SelftestDaemon, vm: Firecracker): Promise<Ending> {
    this.#step('the last capture, paused by the owner');
    await vm.pause(this.#signal);
    const children = await this.#startChildren();
    const last =
      children.length === 0
        ? await this.#capture(daemon, 'vm', this.#request())
        : await this.#fork(daemon, children);
    const difference = await this.#difference(daemon, vm, last.snapshotId);
    if (difference !== null) return ['differs', difference];
    this.#step('the source goes on');
    await vm.resume(this.#signal);
    await this.#rounds(vm, roundsBetween);
    for (const [at, child] of children.entries()) {
      this.#step(`child ${at + 1} goes on`);
      await this.#rounds(child, roundsBetween);
    }
    const [child] = children;
    if (child === undefined) return ['exact', null];
    this.#step('capturing a child');
    await child.pause(this.#signal);
    const ofChild = await this.#capture(daemon, 'child1', this.#request());
    const childDifference = await this.#difference(daemon, child, ofChild.snapshotId);
    return childDifference === null ? ['exact', null] : ['differs', childDifference];
  }

  async #startChildren(): Promise<Firecracker[]> {
    const children: Firecracker[] = [];
    while (children.length < this.#case.children) children.push(await this.#start());
    return children;
  }

  async #fork(daemon: SelftestDaemon, children: readonly Firecracker[]): Promise<CaptureResult> {
    const named = children.map(({ client }, at) => ({
      socketPath: client.socketPath,
      vmId: `child${at + 1}`,
    }));
    const request = { ...this.#request(), children: named };
    const forked = valueOf(await daemon.captures.fork(vmId('vm'), request));
    for (const { failure } of forked.children) if (failure !== null) throw new Failure(failure);
    const { captureId } = forked.capture;
    return resultOf(await daemon.captures.waitFor(captureId, this.#signal));
  }

  /** What differs between the snapshot and the paused VM, or null; a VM restored from it goes on. */
  async #difference(
    daemon: SelftestDaemon,
    vm: Firecracker,
    snapshot: SnapshotId,
  ): Promise<FailureDetail | null> {
    this.#step("comparing with the VMM's own snapshot");
    const own = await vm.ownSnapshot('own', this.#signal);
    const folder = join(vm.folder, 'restored');
    const files = await daemon.restore(snapshot, folder, this.#signal);
    const compared = await compareMemory(files.memoryPath, own.memoryPath, this.#signal);
    await rm(own.memoryPath, { force: true });
    if (compared.differing > 0) {
      const message =
        `${compared.differing} of ${compared.pages} pages differ from the VMM's own snapshot, ` +
        `the first is page ${String(compared.firstDiffering)}`;
      return { kind: 'memory-differs', message };
    }
    // A VM on huge pages is restored by a fault handler only.
    if (!this.#case.hugePages) await this.#goesOn(files);
    await rm(folder, { recursive: true, force: true });
    return null;
  }

  async #goesOn(files: VmFiles): Promise<void> {
    this.#step('a second VM goes on from it');
    await using restored = await this.#start();
    await restored.load(files, this.#case.tracked, this.#signal);
    await restored.resume(this.#signal);
    await this.#rounds(restored, roundsBetween);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.#cleanups[Symbol.asyncDispose]();
  }
}

/** Null where it went well; what was rightly refused, else it throws. */
async function refusal(attempt: () => Promise<unknown>, one: Case): Promise<FailureDetail | null> {
  try {
    await attempt();
    return null;
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    const { detail } = error as Failure;
    if (!one.mayRefuse.includes(detail.kind)) throw error;
    return detail;
  }
}

function resultOf(view: CaptureView): CaptureResult {
  const aborted = { kind: 'capture-aborted', message: `capture ${view.captureId} aborted` };
  if (view.result === null || view.status !== 'published') {
    throw new Failure(view.failure ?? aborted);
  }
  return view.result;
}

function costOf(result: CaptureResult, longestUs: number): CaptureCost {
  const { frozenMs, totalMs, selectedPages, layerBytes } = result;
  return { frozenMs, totalMs, selectedPages, layerBytes, stoodStillMs: longestUs / 1000 };
}
