import type { Context, MiddlewareHandler } from 'hono';
import { setTimeout as sleep } from 'node:timers/promises';
import { refuse } from './answer.ts';
import type { FaultRule, LoggedRequest, Operation } from './control-schema.ts';

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

/** Scripted faults of the VMM's API, and the log of its requests; `/minivm` is exempt from both. */
export class ScriptedFaults {
  readonly requests: LoggedRequest[] = [];
  #armed: { readonly rule: FaultRule; seen: number }[] = [];

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
      if (rule?.when === 'before') await this.#act(c, rule);
      if (rule?.when !== 'before' || rule.action === 'delay') await next();
      if (rule?.when === 'done') await this.#act(c, rule);
      entry.status = c.res.status;
      if (rule?.when === 'answered') setTimeout(dieNow, Math.max(1, rule.afterMs));
      return undefined;
    };
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

  async #act(c: Context, rule: FaultRule): Promise<void> {
    if (rule.afterMs > 0) await sleep(rule.afterMs);
    switch (rule.action) {
      case 'die':
        dieNow();
        return new Promise(() => undefined);
      case 'hang':
        return new Promise(() => undefined);
      case 'refuse':
        c.res = refuse(c, rule.message);
        return;
      case 'garbage':
        c.res = c.body('{"page_size": 4096, "ranges": [', 200, {
          'content-type': 'application/json',
        });
        return;
      case 'delay':
        return;
    }
  }
}
