import type { Hono } from 'hono';
import { PAGE_BYTES } from '../units.ts';
import { jsonText } from './answer.ts';
import { dirtySetFor } from './faults.ts';
import type { Guest } from './guest.ts';

/**
 * What E2B's Firecracker adds. A bitmap has one bit per page, least significant first, each region
 * padded to a whole 64-bit word. Bitmaps need a paused VM, but for the set of an open epoch; reading
 * them clears nothing.
 */
export function e2bRoutes(app: Hono, guest: Guest): void {
  app.get('/memory/mappings', (c) => {
    const rows = guest.vm.regions();
    const mappings: string[] = [];
    for (let i = 0; i < rows.length; i += 4) {
      mappings.push(
        `{"base_host_virt_addr":${rows[i + 1]},"size":${rows[i + 3]},` +
          `"offset":${rows[i + 2]},"page_size":${PAGE_BYTES}}`,
      );
    }
    return jsonText(c, `{"mappings":[${mappings.join(',')}]}`);
  });
  app.get('/memory', (c) => {
    const vm = guest.pausedVm;
    const resident = vm.bitsJson('resident');
    return jsonText(c, `{"resident":${resident},"empty":${vm.bitsJson('empty')}}`);
  });
  app.get('/memory/dirty', (c) =>
    jsonText(c, `{"bitmap":${guest.vmForDirtySet.bitsJson(dirtySetFor(c))}}`),
  );
}
