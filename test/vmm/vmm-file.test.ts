/** A VMM's file that changes while it is taken. */
import { mkdtempSync, readFileSync, rmSync, statSync, truncateSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, expect, test } from 'vitest';
import { takeVmmFile } from '../../src/vmm/vmm-file.ts';

const folder = mkdtempSync(join(tmpdir(), 'varve-vmm-file-'));
afterAll(() => rmSync(folder, { recursive: true }));

const uid = process.getuid?.() ?? 0;
const limits = { uid, bytesMax: 64 * 1024 * 1024 };

test('a file is taken as it is, for us alone', async () => {
  const path = join(folder, 'state');
  const bytes = Buffer.alloc(3 * 1024 * 1024 + 5, 'state');
  writeFileSync(path, bytes);
  const own = join(folder, 'own');
  await takeVmmFile(path, own, limits);
  expect(readFileSync(own).equals(bytes)).toBe(true);
  expect(statSync(own).mode & 0o777).toBe(0o600);
  await expect(takeVmmFile(path, join(folder, 'b'), { ...limits, uid: uid + 1 })).rejects.toThrow(
    /is of user/,
  );
});

test.each([
  ['cut', 0],
  ['made larger', 40 * 1024 * 1024],
])('a file that is %s while it is read is refused, and nobody waits', async (what, size) => {
  const path = join(folder, `changing ${what}`);
  writeFileSync(path, Buffer.alloc(32 * 1024 * 1024, 'x'));
  const taken = takeVmmFile(path, join(folder, `copy ${what}`), limits);
  const refused = expect(taken).rejects.toMatchObject({ detail: { kind: 'vmm-file-bad' } });
  // Opened and looked at; 32 parts are to be read.
  while (statSync(join(folder, `copy ${what}`), { throwIfNoEntry: false }) === undefined) {
    await new Promise((resolve) => setImmediate(resolve));
  }
  truncateSync(path, size);
  await refused;
});
