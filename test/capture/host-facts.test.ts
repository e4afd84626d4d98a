import { mkdir, mkdtemp, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { hostVirtualization } from '../../src/capture/host-facts.ts';

test.each([
  ['no KVM', [], 'none'],
  ['KVM built in, its device not given to us', ['sys/module/kvm/parameters'], 'kvm'],
  ['KVM with its device only', ['dev/kvm'], 'kvm'],
  ['KVM on hardware', ['sys/module/kvm', 'sys/module/kvm_amd', 'dev/kvm'], 'kvm'],
  ['PVM', ['sys/module/kvm', 'sys/module/kvm_pvm', 'dev/kvm'], 'pvm'],
] as const)('a host with %s is told by its modules', async (_what, paths, expected) => {
  const root = await mkdtemp(join(tmpdir(), 'varve-host-'));
  try {
    for (const path of paths) {
      if (!path.startsWith('dev/')) await mkdir(join(root, path), { recursive: true });
      else {
        await mkdir(join(root, 'dev'), { recursive: true });
        await writeFile(join(root, path), '');
      }
    }
    expect(hostVirtualization(root)).toBe(expected);
  } finally {
    await rm(root, { recursive: true });
  }
});
