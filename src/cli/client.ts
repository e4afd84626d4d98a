/** Talks to the daemon: over its Unix socket or a URL, with the token of the environment. */
import { statSync } from 'node:fs';
import { request as httpRequest, type IncomingMessage, type RequestOptions } from 'node:http';
import { request as httpsRequest } from 'node:https';
import type { Command } from 'commander';
import { Failure } from '../result.ts';
import { configFrom, globalOptions, ProblemAnswer } from './context.ts';

/** `unix:/path`, or an http(s) URL. */
export interface Endpoint {
  readonly text: string;
  readonly options: RequestOptions;
  readonly secure: boolean;
}

function endpointOf(text: string): Endpoint {
  if (text.startsWith('unix:') || text.startsWith('/')) {
    const socketPath = text.replace(/^unix:(\/\/)?/, '');
    return { text: `unix:${socketPath}`, options: { socketPath }, secure: false };
  }
  if (!/^https?:\/\//.test(text) || !URL.canParse(text)) {
    const message = `${text} is no daemon address: use unix:/path, http://host:port or https://…`;
    throw new Failure({ kind: 'usage', message });
  }
  const url = new URL(text);
  const secure = url.protocol === 'https:';
  const port = url.port === '' ? (secure ? 443 : 80) : Number(url.port);
  const host = url.hostname.replace(/^\[|\]$/g, '');
  return { text, options: { host, port }, secure };
}

/** `--socket`, `--url`, `VARVE_URL`, else what the configuration listens on. */
export function endpointFrom(command: Command): Endpoint {
  const { socket, url } = globalOptions(command);
  const named = socket ?? url ?? process.env['VARVE_URL'];
  if (named !== undefined && named !== '') return endpointOf(named);
  const { server } = configFrom(command);
  const isThere =
    server.socket !== 'off' && statSync(server.socket, { throwIfNoEntry: false }) !== undefined;
  if (isThere || server.listen === 'off') return endpointOf(`unix:${server.socket}`);
  return endpointOf(`http://${server.listen}`);
}

export interface ServerEvent {
  readonly event: string;
  readonly data: unknown;
}

async function textOf(response: IncomingMessage): Promise<string> {
  const chunks: Buffer[] = [];
  for await (const chunk of response) chunks.push(chunk as Buffer);
  return Buffer.concat(chunks).toString();
}

function unreachable(endpoint: Endpoint, error: Error): Failure {
  const code = 'code' in error ? String(error.code) : error.message;
  const message = `no daemon answers at ${endpoint.text} (${code}); is "varve serve" running?`;
  return new Failure({ kind: 'daemon-unreachable', message }, error);
}

export class Client {
  readonly #endpoint: Endpoint;
  readonly #token: string | undefined;

  constructor(endpoint: Endpoint, token: string | undefined) {
    this.#endpoint = endpoint;
    this.#token = token;
  }

  #send(
    method: string,
    path: string,
    body: unknown,
    headers: Readonly<Record<string, string>>,
  ): Promise<IncomingMessage> {
    const text = body === undefined ? undefined : JSON.stringify(body);
    const sent = {
      ...headers,
      ...(text === undefined ? {} : { 'content-type': 'application/json' }),
      ...(this.#token === undefined ? {} : { authorization: `Bearer ${this.#token}` }),
    };
    const { options, secure } = this.#endpoint;
    const start = secure ? httpsRequest : httpRequest;
    return new Promise((resolve, reject) => {
      // A connection of its own: one kept from before may have been closed by the daemon meanwhile.
      const request = start({ ...options, agent: false, method, path, headers: sent }, resolve);
      request.on('error', (error) => reject(unreachable(this.#endpoint, error)));
      request.end(text);
    });
  }

  /** The JSON of the answer; null for an empty one. Throws `ProblemAnswer` for problems. */
  async call<T>(
    method: string,
    path: string,
    body?: unknown,
    headers: Readonly<Record<string, string>> = {},
  ): Promise<T> {
    const response = await this.#send(method, path, body, headers);
    const text = await textOf(response);
    const status = response.statusCode ?? 0;
    if (status >= 400) throw new ProblemAnswer(status, problemOf(text, status));
    return (text === '' ? null : JSON.parse(text)) as T;
  }

  /** Events of a stream, until it ends. */
  async *events(path: string): AsyncIterable<ServerEvent> {
    const response = await this.#send('GET', path, undefined, { accept: 'text/event-stream' });
    const status = response.statusCode ?? 0;
    if (status >= 400) throw new ProblemAnswer(status, problemOf(await textOf(response), status));
    response.setEncoding('utf8');
    let pending = '';
    for await (const chunk of response) {
      const blocks = (pending + (chunk as string)).split('\n\n');
      pending = blocks.pop() ?? '';
      for (const block of blocks) {
        const event = parseEvent(block);
        if (event !== undefined) yield event;
      }
    }
  }
}

function problemOf(text: string, status: number): Record<string, unknown> {
  try {
    return JSON.parse(text) as Record<string, unknown>;
  } catch {
    return { status, code: 'not-a-daemon', detail: `the answer is no problem document: ${status}` };
  }
}

/** One block of a stream; undefined for comments. */
function parseEvent(block: string): ServerEvent | undefined {
  let event = 'message';
  const data: string[] = [];
  for (const line of block.split('\n')) {
    if (line.startsWith('event:')) event = line.slice('event:'.length).trim();
    else if (line.startsWith('data:')) data.push(line.slice('data:'.length).trim());
  }
  return data.length === 0 ? undefined : { event, data: JSON.parse(data.join('\n')) as unknown };
}

export const clientFrom = (command: Command): Client =>
  new Client(endpointFrom(command), process.env['VARVE_TOKEN']);

export const segment = (text: string): string => encodeURIComponent(text);
