import { Hono } from 'hono';
import { setTimeout as sleep } from 'node:timers/promises';
import { z } from 'zod';
import { PAGE_BYTES } from '../units.ts';
import { noContent, parseBody, parseQuery, VmmFault } from './answer.ts';
import {
  deviceWriteBody,
  faultRule,
  programBody,
  regionList,
  regionSpec,
  removalBody,
  unreadableBody,
  type MiniVmInfo,
} from './control-schema.ts';
import type { ScriptedFaults } from './faults.ts';
import type { Guest } from './guest.ts';
import { pageSets, type NativeVm } from './native.ts';
import { choosePages, splitMix32 } from './page-choice.ts';

const size = z.coerce.number().int().min(0).max(Number.MAX_SAFE_INTEGER);
const range = z.strictObject({ offset: size, length: size.max(1024 * 1024 * 1024) });
const pageRange = z.strictObject({ firstPage: size, pageCount: size });
const at = z.strictObject({ offset: size });
const within = z.strictObject({
  timeoutMs: size.default(60_000),
  /** Wait for this many passes of the program, not for its end. */
  passes: size.optional(),
});
const setName = z.enum(pageSets);

const imageBytes = (vm: NativeVm): number => {
  let total = 0;
  const rows = vm.regions();
  for (let i = 3; i < rows.length; i += 4) total += Number(rows[i]);
  return total;
};

const octets = (view: ArrayBufferView): Response =>
  new Response(new Uint8Array(view.buffer as ArrayBuffer, view.byteOffset, view.byteLength), {
    headers: { 'content-type': 'application/octet-stream' },
  });

function describe(guest: Guest): MiniVmInfo {
  const rows = guest.state === 'Not started' ? new BigUint64Array() : guest.vm.regions();
  const regions: MiniVmInfo['regions'][number][] = [];
  for (let i = 0; i < rows.length; i += 4) {
    regions.push({
      guestAddress: String(rows[i]),
      hostAddress: String(rows[i + 1]),
      imageOffset: Number(rows[i + 2]),
      bytes: Number(rows[i + 3]),
    });
  }
  return {
    pid: process.pid,
    backend: guest.backend,
    backendReason: guest.backendReason,
    dialect: guest.options.dialect,
    state: guest.state,
    tracking: guest.config.track_dirty_pages,
    dirtyEpochs: guest.options.dirtyEpochs,
    imageBytes: regions.reduce((sum, region) => sum + region.bytes, 0),
    regions,
  };
}

/** What the guest shall do, and what it did. */
function programRoutes(app: Hono, guest: Guest): void {
  app.put('/program', async (c) => {
    const body = await parseBody(c, programBody);
    const chosen = choosePages(body.pages, imageBytes(guest.vm) / PAGE_BYTES);
    const placed = guest.vm.program({
      command: body.fill === 'zero' || body.fill === 'constant' ? 'fill' : body.fill,
      list: chosen.kind === 'list' ? chosen.list : undefined,
      first: chosen.kind === 'range' ? chosen.first : 0,
      count: chosen.kind === 'range' ? chosen.count : 0,
      words: body.words,
      value: body.fill === 'zero' ? 0 : body.value,
      loop: body.loop,
      pagesPerSecond: body.pagesPerSecond,
    });
    return c.json(placed);
  });
  app.delete('/program', (c) => {
    guest.vm.program({
      command: 'idle',
      list: undefined,
      first: 0,
      count: 0,
      words: 2,
      value: 0,
      loop: false,
      pagesPerSecond: 0,
    });
    return noContent(c);
  });
  app.get('/program/done', async (c) => {
    const { timeoutMs, passes } = parseQuery(c, within);
    const deadline = performance.now() + timeoutMs;
    for (;;) {
      const counters = guest.vm.counters();
      if (counters.crash !== '') throw new VmmFault(`The guest crashed: ${counters.crash}`);
      const done = passes === undefined ? counters.idle : counters.passes >= passes;
      if (done) return c.json(counters);
      if (performance.now() > deadline) {
        throw new VmmFault(`The program was not done within ${timeoutMs} ms`);
      }
      await sleep(1);
    }
  });
  app.get('/counters', (c) => c.json(guest.vm.counters()));
  app.delete('/gap', (c) => {
    guest.vm.resetGap();
    return noContent(c);
  });
}

/** Guest memory: reads, device writes, hashes, page sets, removal. */
function memoryRoutes(app: Hono, guest: Guest): void {
  app.get('/bytes', (c) => {
    const { offset, length } = parseQuery(c, range);
    return octets(guest.vm.readBytes(offset, length));
  });
  app.put('/bytes', async (c) => {
    const { offset } = parseQuery(c, at);
    guest.vm.deviceWrite(offset, new Uint8Array(await c.req.arrayBuffer()));
    return noContent(c);
  });
  app.put('/device-writes', async (c) => {
    const body = await parseBody(c, deviceWriteBody);
    const vm = guest.vm;
    const chosen = choosePages(body.pages, imageBytes(vm) / PAGE_BYTES);
    const count = chosen.kind === 'list' ? chosen.list.length : chosen.count;
    const data = new Uint32Array(PAGE_BYTES / 4);
    for (let i = 0; i < count; i += 1) {
      const page = chosen.kind === 'list' ? (chosen.list[i] ?? 0) : chosen.first + i;
      const next = splitMix32(body.value ^ Math.imul(page, 0x85ebca6b));
      for (let word = 0; word < data.length; word += 1) data[word] = next();
      vm.deviceWrite(page * PAGE_BYTES, new Uint8Array(data.buffer));
    }
    return noContent(c);
  });
  app.get('/hashes', (c) => {
    const { firstPage, pageCount } = parseQuery(c, pageRange);
    return octets(guest.vm.hashPages(firstPage, pageCount));
  });
  app.get('/sets/:set', (c) => octets(guest.vm.bits(setName.parse(c.req.param('set')))));
  app.post('/removals', async (c) => {
    const { firstPage, pageCount, markDirty } = await parseBody(c, removalBody);
    guest.vm.remove(firstPage, pageCount, markDirty);
    return noContent(c);
  });
}

/** Things that go wrong, and changes a VMM would not make by itself. */
function troubleRoutes(app: Hono, guest: Guest, faults: ScriptedFaults): void {
  app.put('/unreadable', async (c) => {
    const { page, unreadable } = await parseBody(c, unreadableBody);
    guest.vm.setReadable(page, !unreadable);
    return noContent(c);
  });
  app.post('/regions', async (c) => {
    const { guestAddress, bytes } = await parseBody(c, regionSpec);
    guest.vm.addRegion(guestAddress, bytes);
    return c.json(describe(guest));
  });
  app.delete('/regions', (c) => {
    guest.vm.dropRegion();
    return c.json(describe(guest));
  });
  app.post('/faults', async (c) => {
    faults.add(await parseBody(c, faultRule));
    return noContent(c);
  });
  app.delete('/faults', (c) => {
    faults.clear();
    return noContent(c);
  });
  app.get('/requests', (c) => c.json(faults.requests));
  app.delete('/requests', (c) => {
    faults.requests.length = 0;
    return noContent(c);
  });
}

/** The small VM's own endpoints, under `/minivm`. */
export function controlRoutes(guest: Guest, faults: ScriptedFaults): Hono {
  const app = new Hono();
  app.get('/', (c) => c.json(describe(guest)));
  app.put('/regions', async (c) => {
    guest.setRegions((await parseBody(c, regionList)).regions);
    return noContent(c);
  });
  programRoutes(app, guest);
  memoryRoutes(app, guest);
  troubleRoutes(app, guest, faults);
  return app;
}
