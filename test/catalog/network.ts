/** A network to a PostgreSQL server that can be cut without a word to either side. */
import { once } from 'node:events';
import { mkdtemp, rm } from 'node:fs/promises';
import { connect, createServer } from 'node:net';
import type { Server, Socket } from 'node:net';
import { join } from 'node:path';
import { fastFolder } from '../../tools/postgres-server.ts';

const SOCKET_NAME = '.s.PGSQL.5432';

/** The first words of a server that lets everybody in: AuthenticationOk, ReadyForQuery (idle). */
const WELCOME = Buffer.from([0x52, 0, 0, 0, 8, 0, 0, 0, 0, 0x5a, 0, 0, 0, 5, 0x49]);

export class Network implements AsyncDisposable {
  /** What catalogs connect to. */
  readonly url: string;
  /** Clients' ends, all that ever connected. */
  readonly taken: Socket[] = [];
  readonly #folder: string;
  readonly #server: Server;
  readonly #others: Socket[] = [];
  #isCut = false;

  private constructor(folder: string, url: string) {
    this.#folder = folder;
    this.url = url;
    this.#server = createServer({ allowHalfOpen: true });
  }

  /** In front of the server at `url`; null: of one that lets clients in and then says nothing. */
  static async before(url: string | null): Promise<Network> {
    const folder = await mkdtemp(join(fastFolder, 'varve-network-'));
    const own = new URL(url ?? 'postgres://varve@localhost/varve');
    const far = new URL(own);
    own.hostname = 'localhost';
    own.searchParams.set('host', folder);
    const network = new Network(folder, own.href);
    network.#server.on('connection', (near: Socket) => network.#take(near, url === null, far));
    network.#server.listen(join(folder, SOCKET_NAME));
    await once(network.#server, 'listening');
    return network;
  }

  get isCut(): boolean {
    return this.#isCut;
  }

  /** Connections stay open and carry nothing any more, not even their ends; new ones are refused. */
  cut(): void {
    this.#isCut = true;
  }

  /** For new connections; what was cut stays so. */
  mend(): void {
    for (const socket of [...this.taken, ...this.#others]) socket.removeAllListeners('data');
    this.#isCut = false;
  }

  /** Until every client has closed its socket, both ways: only then does writing to it fail. */
  async closed(): Promise<void> {
    const open = this.taken.filter((socket) => !socket.destroyed);
    await Promise.all(
      open.map((socket) => {
        const closed = new Promise((resolve) => socket.once('close', resolve));
        socket.write('.');
        return closed;
      }),
    );
  }

  #take(near: Socket, isMute: boolean, far: URL): void {
    near.on('error', () => undefined);
    if (this.#isCut) {
      near.destroy();
      return;
    }
    this.taken.push(near);
    if (isMute) {
      near.once('data', () => near.write(WELCOME)).resume();
      return;
    }
    const folder = far.searchParams.get('host');
    const path = join(folder ?? '', SOCKET_NAME);
    const other = connect(
      folder === null ? { host: far.hostname, port: Number(far.port || 5432) } : { path },
    );
    this.#others.push(other.on('error', () => undefined));
    for (const [from, to] of [
      [near, other],
      [other, near],
    ] as const) {
      from.on('data', (chunk) => {
        if (!this.#isCut) to.write(chunk);
      });
      from.on('end', () => {
        if (!this.#isCut) to.end();
      });
    }
  }

  async [Symbol.asyncDispose](): Promise<void> {
    for (const socket of [...this.taken, ...this.#others]) socket.destroy();
    this.#server.close();
    await rm(this.#folder, { recursive: true, force: true });
  }
}
