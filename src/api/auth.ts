/**
 * Bearer tokens with scopes. Without tokens everybody who can reach the daemon may do
 * everything.
 */
import { createHash, timingSafeEqual } from 'node:crypto';
import type { MiddlewareHandler } from 'hono';
import type { Config } from '../config/load.ts';
import { refused } from './problem.ts';
import type { ApiEnv } from './router.ts';

export type Scope = 'read' | 'capture' | 'admin';

/** Each scope includes those before it. */
const rank = { read: 0, capture: 1, admin: 2 } as const satisfies Record<Scope, number>;

export interface Principal {
  /** Name of the token, or `local` where none are configured. */
  readonly name: string;
  readonly scopes: readonly Scope[];
}

interface KnownToken extends Principal {
  readonly sha256: Buffer;
}

const sha256 = (text: string): Buffer => createHash('sha256').update(text, 'utf8').digest();

/** Answers with what a token may do, in time that does not depend on which token it is. */
export function createAuthenticator(
  tokens: Config['auth']['tokens'],
): (header: string | undefined) => Principal | undefined {
  const known: KnownToken[] = tokens.map((t) => ({
    name: t.name,
    scopes: t.scopes,
    sha256:
      t.token === undefined ? Buffer.from(t.tokenSha256 ?? '', 'hex') : sha256(t.token.reveal()),
  }));
  return (header) => {
    if (known.length === 0) return { name: 'local', scopes: ['admin'] };
    const match = /^Bearer +([A-Za-z0-9._~+/=-]{1,4096})$/i.exec(header ?? '');
    const given = sha256(match?.[1] ?? '');
    let found: KnownToken | undefined;
    for (const token of known) {
      if (timingSafeEqual(given, token.sha256)) found ??= token;
    }
    return match === null || found === undefined
      ? undefined
      : { name: found.name, scopes: found.scopes };
  };
}

/** What anybody may ask without a token: whether the daemon lives, and how its API looks. */
const open = new Set(['/healthz', '/readyz', '/openapi.json', '/docs', '/docs/problems']);

/** Refuses requests without a known token before anything of them is read. */
export function authenticate(tokens: Config['auth']['tokens']): MiddlewareHandler<ApiEnv> {
  const authenticator = createAuthenticator(tokens);
  return async (c, next) => {
    const principal = authenticator(c.req.header('authorization'));
    if (principal === undefined && !open.has(c.req.path)) {
      c.header('WWW-Authenticate', 'Bearer realm="varve"');
      throw refused('unauthorized', 'a bearer token that is in [[auth.tokens]] is needed');
    }
    c.set('principal', principal ?? { name: 'anonymous', scopes: [] });
    await next();
  };
}

/** Guards one route. */
export function needs(scope: Scope): MiddlewareHandler<ApiEnv> {
  return async (c, next) => {
    const principal = c.get('principal');
    if (!principal.scopes.some((has) => rank[has] >= rank[scope])) {
      throw refused('forbidden', `the token ${principal.name} lacks the scope ${scope}`);
    }
    await next();
  };
}

const changesNothing = new Set(['GET', 'HEAD', 'OPTIONS']);

/** Whether the page that sends the request is another server's. Programs send neither header. */
function isForeign(of: { origin?: string; host: string; site?: string }): boolean {
  if (of.site !== undefined && of.site !== 'same-origin' && of.site !== 'none') return true;
  if (of.origin === undefined) return false;
  return !URL.canParse(of.origin) || new URL(of.origin).host !== of.host;
}

/**
 * Without tokens, any page that a browser on this host shows could send requests that change something,
 * even ones without a body. Browsers say where a request comes from.
 */
export function guardOrigin(tokens: Config['auth']['tokens']): MiddlewareHandler<ApiEnv> {
  return async (c, next) => {
    const host = c.req.header('host') ?? '';
    const origin = c.req.header('origin');
    const site = c.req.header('sec-fetch-site');
    const from = {
      host,
      ...(origin === undefined ? {} : { origin }),
      ...(site === undefined ? {} : { site }),
    };
    if (tokens.length === 0 && !changesNothing.has(c.req.method) && isForeign(from)) {
      const message = 'without [[auth.tokens]], requests of pages of other servers are refused';
      throw refused('origin-refused', message);
    }
    await next();
  };
}

const localHost = /^(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d{1,5})?$/i;

/**
 * Without tokens, a web page could reach a loopback port through a name that resolves to it. Its
 * requests carry that name, so only local ones are answered. Unix sockets have no such name.
 */
export function guardHost(tokens: Config['auth']['tokens']): MiddlewareHandler<ApiEnv> {
  return async (c, next) => {
    const host = c.req.header('host') ?? 'localhost';
    if (tokens.length === 0 && !localHost.test(host)) {
      throw refused('host-refused', 'without [[auth.tokens]], only local host names are answered');
    }
    await next();
  };
}
