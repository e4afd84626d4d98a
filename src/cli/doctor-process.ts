/** Whether this process may read the memory of VMMs, tried on a child of its own. */
import { spawn, type ChildProcess } from 'node:child_process';
import { once } from 'node:events';
import { existsSync, readFileSync } from 'node:fs';
import { errnoName, pagemapScan, readProcess } from '../native/guest.ts';
import { runsSources, threadRuns, type RunsSource } from '../native/threads.ts';
import { PAGE_BYTES } from '../units.ts';
import { fail, fine, warn, type Finding } from './finding.ts';

const CAP_SYS_PTRACE = 19n;
const READ_DEADLINE_MS = 1_000;

function hasPtraceCapability(): boolean {
  const status = readFileSync('/proc/self/status', 'utf8');
  const effective = /^CapEff:\s+([0-9a-f]+)$/m.exec(status)?.[1] ?? '0';
  return ((BigInt(`0x${effective}`) >> CAP_SYS_PTRACE) & 1n) === 1n;
}

/** Yama decides who may trace whom; process_vm_readv asks the same question. */
export function checkPtrace(): Finding {
  if (hasPtraceCapability()) return fine('ptrace', 'this process has CAP_SYS_PTRACE');
  const yama = '/proc/sys/kernel/yama/ptrace_scope';
  const scope = existsSync(yama) ? readFileSync(yama, 'utf8').trim() : '0';
  const advice =
    'Give the daemon CAP_SYS_PTRACE (AmbientCapabilities= in the unit, setcap on node), or run it ' +
    'as root.';
  if (scope === '0') {
    const found = 'no CAP_SYS_PTRACE: only VMMs of the same user can be captured';
    return warn('ptrace', found, advice);
  }
  return fail('ptrace', `no CAP_SYS_PTRACE, and Yama's ptrace_scope is ${scope}`, advice);
}

/** Start of the first private readable mapping of a process. */
function firstMapping(pid: number): bigint {
  const line = readFileSync(`/proc/${pid}/maps`, 'utf8')
    .split('\n')
    .find((candidate) => / r..p /.test(candidate));
  return BigInt(`0x${line?.split('-')[0] ?? '0'}`);
}

async function withChild<T>(work: (child: ChildProcess, pid: number) => T): Promise<T> {
  const child = spawn('/bin/sleep', ['60'], { stdio: 'ignore' });
  await once(child, 'spawn');
  try {
    return work(child, child.pid ?? 0);
  } finally {
    child.kill('SIGKILL');
    await once(child, 'exit');
  }
}

/** A real read of one page of a real process. */
export function checkRead(): Promise<Finding> {
  return withChild((_child, pid) => {
    const read = readProcess({
      pid,
      rows: BigUint64Array.of(firstMapping(pid), 0n, BigInt(PAGE_BYTES)),
      dest: new Uint8Array(PAGE_BYTES),
      from: 0,
      cancel: new Int32Array(new SharedArrayBuffer(4)),
      cancelIndex: 0,
      enomemDeadlineMs: READ_DEADLINE_MS,
    });
    if (read.error === 0 && read.bytesDone === PAGE_BYTES) {
      return fine('process-read', 'process_vm_readv of a child works');
    }
    const found = `process_vm_readv of a child: ${errnoName(read.error)}`;
    const advice = 'A container or seccomp profile forbids it: allow process_vm_readv.';
    return fail('process-read', found, advice);
  });
}

/** What tells whether a guest ran while it was captured. */
export function checkThreadRuns(): Promise<Finding> {
  return withChild((_child, pid) => {
    const told = (source: RunsSource): boolean =>
      threadRuns(pid, pid, source, { withState: true }).error === 0;
    const source = runsSources.find(told);
    if (source === 'schedstat') return fine('thread-runs', 'turns of threads are counted');
    if (source !== undefined) {
      return fine('thread-runs', 'no schedstat: context switches are counted, a little slower');
    }
    const advice =
      'Let the daemon read /proc of VMMs (hidepid). Until then a VM that its owner resumes and ' +
      'pauses while it is captured is not noticed.';
    return warn('thread-runs', 'threads of a child are not told of', advice);
  });
}

export function checkPagemap(): Promise<Finding> {
  return withChild((_child, pid) => {
    const regions = BigUint64Array.of(0n, BigInt(PAGE_BYTES), firstMapping(pid));
    const scanned = pagemapScan({ pid, regions, pageCount: 1, mode: 'resident' });
    if (scanned.error !== 0) {
      const found = `/proc/<pid>/pagemap of a child: ${errnoName(scanned.error)}`;
      return fail('pagemap', found, 'Give the daemon CAP_SYS_PTRACE, or run it as root.');
    }
    if (scanned.method === 'scan') return fine('pagemap', 'PAGEMAP_SCAN works');
    const advice = 'Linux 6.7 or newer has PAGEMAP_SCAN, which does not read pages one by one.';
    return warn('pagemap', 'PAGEMAP_SCAN is missing; page maps are read in full', advice);
  });
}
