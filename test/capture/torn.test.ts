/**
 * The owner of a VM resumes it while it is captured, or resumes and pauses it again, at each step. The
 * snapshot is of one moment, or there is none and the next capture has everything.
 */
import { afterEach, expect, test, vi } from 'vitest';
import { FileArtifactStore } from '../../src/artifact/file-store.ts';
import type { CaptureRequest, CaptureView } from '../../src/capture/types.ts';
import { LayerWriter } from '../../src/layer/layer-writer.ts';
import type { FaultBody } from '../../src/minivm/control-schema.ts';
import type { MiniVm } from '../../src/minivm/launch.ts';
import type { VmId } from '../../src/units.ts';
import { allBytes, firstDifferingPage, Harness } from './harness.ts';

afterEach(() => vi.restoreAllMocks());

type Act = 'owner-resumes' | 'owner-interrupts';

interface Step {
  readonly name: string;
  /** Of the requests that the VMM gets. */
  readonly at?: Pick<FaultBody, 'on' | 'when' | 'skip'>;
  /** The VM's own moment is before what the owner's run writes, or after it. */
  readonly moment: 'before' | 'after';
  /** Acts that must not be let pass. */
  readonly ran: readonly Act[];
  readonly acts?: readonly Act[];
  /** Only where it is this daemon that pauses. */
  readonly ours?: true;
}

const both = ['owner-resumes', 'owner-interrupts'] as const;

const saved: readonly Step[] = [
  {
    ...{ name: 'once the pause is done', ours: true, moment: 'after', ran: ['owner-resumes'] },
    at: { on: 'pause', when: 'done' },
  },
  {
    ...{ name: 'before the state is saved', moment: 'after', ran: ['owner-resumes'] },
    at: { on: 'snapshot-create' },
  },
];

/** What comes after the state was saved, where pages are read from the process. */
const ofProcess: readonly Step[] = [
  {
    // No VMM answers another request before this one.
    ...{ name: 'once the state is saved', moment: 'before', ran: both, acts: ['owner-resumes'] },
    at: { on: 'snapshot-create', when: 'done' },
  },
  { name: 'while pages are read', moment: 'before', ran: both },
];

const steps = {
  aenv: [
    ...saved,
    ...ofProcess,
    {
      ...{ name: 'before the dirty set is told', moment: 'before', ran: both },
      at: { on: 'dirty', skip: 1 },
    },
    {
      ...{ name: 'once the dirty set is told', moment: 'before', ran: both },
      at: { on: 'dirty', when: 'done', skip: 1 },
    },
  ],
  e2b: [
    ...saved,
    ...ofProcess,
    { name: 'before the dirty set is told', moment: 'before', ran: both, at: { on: 'dirty' } },
    {
      ...{ name: 'once the dirty set is told', moment: 'before', ran: both },
      at: { on: 'dirty', when: 'done' },
    },
  ],
  firecracker: [
    ...saved,
    {
      ...{ name: 'once state and memory are saved', moment: 'before', ran: ['owner-resumes'] },
      at: { on: 'snapshot-create', when: 'done' },
    },
  ],
} satisfies Record<string, readonly Step[]>;

const always: readonly Step[] = [
  { name: 'before the layer is sealed', moment: 'before', ran: [] },
  { name: 'while it is published', moment: 'before', ran: [] },
];

/** Runs `act` once, when the step comes that no request marks. */
function atStep(name: string, act: () => Promise<void>): void {
  const [of, method] = {
    'while pages are read': [LayerWriter.prototype, 'append'],
    'before the layer is sealed': [LayerWriter.prototype, 'seal'],
    'while it is published': [FileArtifactStore.prototype, 'put'],
  }[name] as [Record<string, (...args: unknown[]) => unknown>, string];
  const original = of[method];
  const spy = vi.spyOn(of, method).mockImplementationOnce(async function (this: unknown, ...args) {
    spy.mockRestore();
    await act();
    return original?.apply(this, args);
  });
}

class Played {
  readonly harness: Harness;
  readonly vm: MiniVm;
  readonly vmId: VmId;
  readonly by: 'us' | 'owner';
  #value = 10;

  constructor(harness: Harness, vm: MiniVm, vmId: VmId, by: 'us' | 'owner') {
    this.harness = harness;
    this.vm = vm;
    this.vmId = vmId;
    this.by = by;
  }

  async step({ at, name, moment, ran }: Step, act: Act, request: CaptureRequest): Promise<void> {
    const { vm, harness, by } = this;
    const what = `${act} ${name}`;
    await vm.resume();
    await vm.run({ pages: { firstPage: 500, pageCount: 1500 }, words: 2, value: ++this.#value });
    if (by === 'owner') await vm.pause();
    const before = await allBytes(vm);
    const pages = { firstPage: 900, pageCount: 1100 };
    const value = ++this.#value;
    if (at === undefined) {
      atStep(name, async () => {
        await vm.resume();
        await vm.run({ pages, value, words: 2 });
        if (act === 'owner-interrupts') await vm.pause();
      });
    } else {
      await vm.fault({ ...at, action: act, writes: { ...pages, value } });
    }
    const view = await harness.capture(this.vmId, request);
    await vm.clearFaults();
    const after = await allBytes(vm);
    expect(firstDifferingPage(before, after), `${what}: the guest ran`).not.toBeNull();
    expect([view.status, view.failure?.kind], what).toEqual(
      ran.includes(act) ? ['aborted', 'vm-ran'] : ['published', undefined],
    );
    // What its owner did last stands, unless a pause of ours is undone.
    const stands = act === 'owner-interrupts' && by === 'owner';
    expect((await vm.info()).state, what).toBe(stands ? 'Paused' : 'Running');
    expect(harness.service.getVm(this.vmId)?.pausedByUs, what).toBe(false);
    if (view.status === 'published') {
      await this.#isOf(view, moment === 'before' ? before : after, what);
    }
    await this.#isOf(await harness.capture(this.vmId, {}), after, `the next after ${what}`);
  }

  async #isOf({ result, failure }: CaptureView, bytes: Buffer, what: string): Promise<void> {
    expect(failure, what).toBeNull();
    const read = await this.harness.memoryOf(result?.snapshotId ?? '');
    expect(firstDifferingPage(read, bytes), what).toBeNull();
  }
}

const cases = (['thread', 'auto'] as const).flatMap((backend) =>
  (['aenv', 'e2b', 'firecracker'] as const).flatMap((dialect) =>
    (['us', 'owner'] as const)
      // A KVM guest is slow where KVM is emulated: each dialect once.
      .filter((by) => backend === 'thread' || (by === 'owner') === (dialect === 'e2b'))
      .map((by) => ({ backend, dialect, by })),
  ),
);

test.each(cases)(
  'dialect $dialect, guest $backend, paused by $by: no snapshot is of two moments',
  async ({ backend, dialect, by }) => {
    // Slabs hold less than is read: pages are read after the first are appended.
    await using harness = await Harness.make({
      pipeline: { slab_budget: '2MiB', slab_bytes: '256KiB', coalesce: { batch_bytes: '256KiB' } },
    });
    await using vm = await harness.vm({ dialect, backend, memoryMib: 8 });
    const { vmId } = await harness.attach(vm, { trackingMode: 'dirty' });
    await harness.published(vmId);
    const played = new Played(harness, vm, vmId, by);
    for (const step of [...(steps[dialect] as readonly Step[]), ...always]) {
      if (step.ours === true && by === 'owner') continue;
      for (const act of step.acts ?? both) {
        const resumeAfter = act === 'owner-resumes' ? 'copy' : 'publish';
        await played.step(step, act, { resumeAfter });
      }
    }
  },
);
