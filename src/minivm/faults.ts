import type { Context, MiddlewareHandler, Next } from 'hono';
import { setTimeout as sleep } from 'node:timers/promises';
import { jsonText, refuse } from './answer.ts';
import {
  lies,
  ownersActs,
  type FaultRule,
  type LoggedRequest,
  type Operation,
} from './control-schema.ts';
import type { Guest } from './guest.ts';
import type { PageSet } from './native.ts';

const REQUESTS_KEPT_MAX = 100_000;

/** The process ends as a VMM that crashed does: no cleanup, nothing answered. */
export function dieNow(): void {
  process.kill(process.pid, 'SIGKILL');
}

async function operationOf(c: Context): Promise<Operation> {
  const { method, path } = c.req;
  if (path === '/vm' && method === 'PATCH') {
    return (await c.req.text()).includes('Paused') ? 'pause' : 'resume';
  }
  if (path === '/snapshot/create') return 'snapshot-create';
  if (path === '/snapshot/load') return 'snapshot-load';
  if (path === '/vm/dirty-memory-ranges' || path === '/memory/dirty' || path === '/memory') {
    return 'dirty';
  }
  if (path === '/memory/mappings') return 'mappings';
  if (path === '/vm/dirty-epoch') return 'epoch';
  if (path === '/actions') return 'start';
  if (method !== 'GET') return 'configure';
  return ['/', '/version', '/machine-config', '/vm/config'].includes(path) ? 'describe' : 'other';
}

const dirtySetKey = 'dirty-set';

/** The set that this request's answer about dirty pages is of: a scripted lie may name another. */
export function dirtySetFor(c: Context): PageSet {
  return (c.get(dirtySetKey) as PageSet | undefined) ?? 'dirty';
}

type Lie = (typeof lies)[number];

const isLie = (action: string): action is Lie => (lies as readonly string[]).includes(action);

async function answerFalsely(c: Context, lie: Lie, next: Next): Promise<void> {
  if (lie === 'no-device-writes') c.set(dirtySetKey, 'guest-log');
  await next();
  if (c.res.ok) c.res = falsify(c, lie, await c.res.text());
}

const goesOn = (action: string): boolean =>
  action === 'delay' || (ownersActs as readonly string[]).includes(action);

/** The answer as a VMM with another idea of page counts would give it. Digits stay exact. */
function falsify(c: Context, lie: Lie, text: string): Response {
  switch (lie) {
    case 'bitmap-short':
      return jsonText(c, text.replace(/,?\d+\]/, ']'));
    case 'bitmap-long':
      return jsonText(c, text.replace(']', ',0]'));
    case 'bitmap-tail':
      return jsonText(c, text.replace(/\d+\]/, `${2n ** 64n - 1n}]`));
    case 'page-size':
      return jsonText(c, text.replaceAll('"page_size":4096', '"page_size":12288'));
    case 'no-device-writes':
      return jsonText(c, text);
  }
}

/** Scripted faults of the VMM's API, and the log of its requests; `/minivm` is exempt from both. */
export class ScriptedFaults {
  readonly requests: LoggedRequest[] = [];
  readonly #guest: Guest;
  #armed: { readonly rule: FaultRule; seen: number }[] = [];

  constructor(guest: Guest) {
    this.#guest = guest;
  }

  add(rule: FaultRule): void {
    if (rule.on === 'now') {
      if (rule.action !== 'die') throw new Error('`now` can only `die`');
      setTimeout(dieNow, rule.afterMs);
      return;
    }
    this.#armed.push({ rule, seen: 0 });
  }

  clear(): void {
    this.#armed = [];
  }

  middleware(): MiddlewareHandler {
    return async (c, next) => {
      if (c.req.path === '/minivm' || c.req.path.startsWith('/minivm/')) return next();
      const operation = await operationOf(c);
      const entry = { method: c.req.method, path: c.req.path, operation, status: 0 };
      if (this.requests.length < REQUESTS_KEPT_MAX) this.requests.push(entry);
      const rule = this.#strike(operation);
      if (rule !== undefined && isLie(rule.action)) await answerFalsely(c, rule.action, next);
      else await this.#answer(c, rule, next);
      entry.status = c.res.status;
      if (rule?.when === 'answered') setTimeout(dieNow, Math.max(1, rule.afterMs));
      return undefined;
    };
  }

  async #answer(c: Context, rule: FaultRule | undefined, next: Next): Promise<void> {
    if (rule?.when === 'before') await this.#act(c, rule);
    if (rule?.when !== 'before' || goesOn(rule.action)) await next();
    if (rule?.when === 'done') await this.#act(c, rule);
  }

  #strike(operation: Operation): FaultRule | undefined {
    let struck: FaultRule | undefined;
    for (const armed of this.#armed) {
      const { rule } = armed;
      if (rule.on !== 'any' && rule.on !== operation) continue;
      armed.seen += 1;
      const nth = armed.seen - rule.skip;
      if (nth >= 1 && (rule.times === 0 || nth <= rule.times)) struck ??= rule;
    }
    return struck;
  }

  /** The VM runs, by its owner's request, until the guest has written; then it may be paused again. */
  async #ownerActs({ action, writes }: FaultRule): Promise<void> {
    const guest = this.#guest;
    guest.resume();
    guest.vm.program({
      ...{ command: 'random', list: undefined, loop: false, words: 2, pagesPerSecond: 0 },
      ...{ first: writes.firstPage, count: writes.pageCount, value: writes.value },
    });
    while (!guest.vm.counters().idle) await sleep(1);
    if (action === 'owner-interrupts') guest.pause();
  }

  async #act(c: Context, rule: FaultRule): Promise<void> {
    const { action, afterMs, message } = rule;
    if (afterMs > 0) await sleep(afterMs);
    if (action === 'die') dieNow();
    if (action === 'die' || action === 'hang') await new Promise(() => undefined);
    if (action === 'refuse') c.res = refuse(c, message);
    if (action === 'owner-resumes' || action === 'owner-interrupts') await this.#ownerActs(rule);
    if (action === 'garbage') c.res = jsonText(c, '{"page_size": 4096, "ranges": [');
  }
}
