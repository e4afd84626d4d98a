/** The host: kernel, KVM, swap, limits, memory. */
import { closeSync, existsSync, openSync, readFileSync } from 'node:fs';
import { release, freemem, totalmem } from 'node:os';
import type { Config } from '../config/load.ts';
import { launchMiniVm } from '../minivm/launch.ts';
import { systemCode } from '../result.ts';
import { checkSwap, readSwapAreas } from '../vmm/swap.ts';
import { fail, fine, warn, type Finding } from './finding.ts';
import { sizeText } from './table.ts';

const KERNEL_MIN = [5, 3] as const;
/** PAGEMAP_SCAN came with 6.7. */
const KERNEL_SCAN = [6, 7] as const;

const atLeast = (version: readonly number[], min: readonly [number, number]): boolean => {
  const [major = 0, minor = 0] = version;
  return major > min[0] || (major === min[0] && minor >= min[1]);
};

export function checkKernel(): Finding {
  const text = release();
  const version = text.split('.').map((part) => Number.parseInt(part, 10));
  if (!atLeast(version, KERNEL_MIN)) {
    return fail('kernel', text, 'Linux 5.3 or newer is needed (pidfds pin the VMM process).');
  }
  if (!atLeast(version, KERNEL_SCAN)) {
    const advice = 'Linux 6.7 or newer scans page maps in one call; older ones read them in full.';
    return warn('kernel', text, advice);
  }
  return fine('kernel', text);
}

export function checkNode(): Finding {
  const [major = 0, minor = 0] = process.versions.node.split('.').map(Number);
  const isNew = major > 20 || (major === 20 && minor >= 11);
  if (isNew) return fine('node', process.version);
  return fail('node', process.version, 'Node.js 20.11 or newer is needed.');
}

/** Opens /dev/kvm, then boots a guest of 16 MiB on it: only that shows that it works. */
export async function checkKvm(): Promise<Finding> {
  try {
    closeSync(openSync('/dev/kvm', 'r+'));
  } catch (error) {
    const code = systemCode(error) ?? String(error);
    const advice =
      code === 'EACCES'
        ? 'Add this user to the group that owns /dev/kvm. Only VMMs and the demo need it.'
        : 'Load kvm_intel or kvm_amd, or allow nested virtualisation. Firecracker needs it; Varve ' +
          'itself does not, and its demo then runs a thread in place of a guest.';
    return warn('kvm', `/dev/kvm: ${code}`, advice);
  }
  try {
    await using vm = await launchMiniVm({ backend: 'kvm', memoryMib: 16 });
    return fine('kvm', `/dev/kvm works: process ${vm.pid} ran a guest`);
  } catch (error) {
    const found = `/dev/kvm opens, but no guest runs: ${(error as Error).message}`;
    return warn('kvm', found, 'See whether another hypervisor holds the CPU, and the kernel log.');
  }
}

export async function checkSwapSpace(config: Config): Promise<Finding> {
  const areas = await readSwapAreas();
  if (areas.length === 0) return fine('swap', 'the host does not swap');
  const names = areas.map((area) => `${area.name} ${sizeText(area.sizeBytes)}`).join(', ');
  const checked = checkSwap(areas, false);
  if (checked.ok) return fine('swap', names);
  const advice =
    'A page of a guest that is swapped out is not resident. VMMs that report residency alone are ' +
    'refused in tracking mode mincore: use swapoff -a, or tracking_mode = "dirty".';
  const isMincore = config.memorySnapshot.trackingMode === 'mincore';
  return isMincore ? warn('swap', names, advice) : fine('swap', `${names}; not in mode mincore`);
}

export function checkUserfaultfd(): Finding {
  const setting = '/proc/sys/vm/unprivileged_userfaultfd';
  const isThere = existsSync(setting);
  if (!isThere) {
    const advice = 'Restores that load pages on demand need CONFIG_USERFAULTFD; others do not.';
    return warn('userfaultfd', 'the kernel has none', advice);
  }
  const isOpen = readFileSync(setting, 'utf8').trim() === '1' || process.getuid?.() === 0;
  if (isOpen || existsSync('/dev/userfaultfd')) return fine('userfaultfd', 'usable');
  const advice = 'Set vm.unprivileged_userfaultfd=1, or give access to /dev/userfaultfd.';
  return warn('userfaultfd', 'only for root', advice);
}

/** Soft limit of a line of /proc/self/limits; Infinity where unlimited. */
function limitOf(name: string): number {
  const line = readFileSync('/proc/self/limits', 'utf8')
    .split('\n')
    .find((candidate) => candidate.startsWith(name));
  const soft = line?.slice(name.length).trim().split(/\s+/)[0] ?? '0';
  return soft === 'unlimited' ? Infinity : Number(soft);
}

const FILES_MIN = 4096;

export function checkFiles(): Finding {
  const files = limitOf('Max open files');
  if (files >= FILES_MIN) return fine('open-files', `limit ${files}`);
  const advice = `Chains open many files: raise the limit to ${FILES_MIN} (LimitNOFILE=, ulimit -n).`;
  return warn('open-files', `limit ${files}`, advice);
}

export function checkMemlock(): Finding {
  const limit = limitOf('Max locked memory');
  const found = limit === Infinity ? 'unlimited' : sizeText(limit);
  return fine('memlock', `limit ${found}; slabs are not locked`);
}

function availableMemory(): number {
  const line = /^MemAvailable:\s+(\d+) kB$/m.exec(readFileSync('/proc/meminfo', 'utf8'));
  return line === null ? freemem() : Number(line[1]) * 1024;
}

/** Beside the slabs the daemon needs about this much. */
const DAEMON_BYTES = 192 * 1024 * 1024;

export function checkMemory(config: Config): Finding {
  const need = config.pipeline.slabBudget + DAEMON_BYTES;
  const available = availableMemory();
  const found =
    `${sizeText(available)} of ${sizeText(totalmem())} available; the daemon takes about ` +
    `${sizeText(need)} (pipeline.slab_budget and ${sizeText(DAEMON_BYTES)})`;
  if (available >= 2 * need) return fine('memory', found);
  const advice = 'Lower pipeline.slab_budget, or free memory: the slabs are touched at start.';
  return available >= need ? warn('memory', found, advice) : fail('memory', found, advice);
}

export function checkHugePages(): Finding {
  const path = '/sys/kernel/mm/transparent_hugepage/enabled';
  if (!existsSync(path)) return fine('huge-pages', 'the kernel has no transparent huge pages');
  const mode = /\[(\w+)\]/.exec(readFileSync(path, 'utf8'))?.[1] ?? 'unknown';
  if (mode !== 'never') return fine('huge-pages', `transparent huge pages: ${mode}`);
  const advice = 'Set them to madvise: copying into slabs is faster with huge pages.';
  return warn('huge-pages', 'transparent huge pages: never', advice);
}
