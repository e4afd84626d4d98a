import { expect, test } from 'vitest';
import { vmmTimeouts } from '../../src/capture/attach.ts';
import { configOf } from '../../src/config/load.ts';

test('every wait for a VMM is as long as the configuration says', () => {
  const vmm = { request_timeout: '40s', snapshot_timeout: '7m' };
  expect(vmmTimeouts(configOf({ vmm }))).toEqual({
    queryMs: 40_000,
    changeMs: 40_000,
    bulkMs: 40_000,
    snapshotMs: 420_000,
  });
  expect(vmmTimeouts(configOf({ vmm: { request_timeout: '2s' } }))).toMatchObject({
    queryMs: 2_000,
    bulkMs: 30_000,
  });
});
