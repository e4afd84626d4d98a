import type { Context, Hono } from 'hono';
import { PAGE_BYTES } from '../units.ts';
import { jsonText } from './answer.ts';
import { dirtySetFor } from './faults.ts';
import type { Guest } from './guest.ts';
import type { PageSet } from './native.ts';

/**
 * Page ranges of a set, in AgentENV's shape. Numbers are bare and have all their digits. With
 * tracking off, the dirty set is the resident pages. Reading clears nothing.
 */
export function rangesAnswer(c: Context, guest: Guest, set: PageSet): Response {
  const vm = guest.vm;
  const ranges = vm.rangesJson(set);
  const regions = vm.regions();
  let memoryBytes = 0n;
  for (let i = 3; i < regions.length; i += 4) memoryBytes += regions[i] ?? 0n;
  const head = `{"page_size":${PAGE_BYTES},"memory_size":${memoryBytes},"ranges":`;
  return jsonText(c, `${head}${ranges}}`);
}

/** What AgentENV's Firecracker adds. */
export function aenvRoutes(app: Hono, guest: Guest): void {
  app.get('/vm/dirty-memory-ranges', (c) => rangesAnswer(c, guest, dirtySetFor(c)));
}
