import { request } from 'node:http';
import type {
  DeviceWriteBody,
  FaultBody,
  LoggedRequest,
  MiniVmInfo,
  ProgramBody,
  RemovalBody,
} from './control-schema.ts';
import type { EpochStatus, GuestCounters, PageSet } from './native.ts';

export interface ApiAnswer {
  readonly status: number;
  readonly body: Buffer;
}

/** A request that the VM refused. */
export class MiniVmError extends Error {
  override readonly name = 'MiniVmError';
  readonly status: number;
  constructor(status: number, message: string) {
    super(message);
    this.status = status;
  }
}

/** Requests to a small VM: its Firecracker API in short form, and its control endpoints. */
export class MiniVmClient {
  readonly socketPath: string;
  constructor(socketPath: string) {
    this.socketPath = socketPath;
  }

  /** One request, whatever its answer. Rejects when the connection fails or is cut. */
  send(method: string, path: string, body?: unknown): Promise<ApiAnswer> {
    const isBytes = body instanceof Uint8Array;
    const payload = body === undefined || isBytes ? body : JSON.stringify(body);
    return new Promise((resolve, reject) => {
      const sent = request(
        {
          socketPath: this.socketPath,
          method,
          path,
          agent: false,
          headers: payload === undefined ? {} : { 'content-length': Buffer.byteLength(payload) },
        },
        (answer) => {
          const chunks: Buffer[] = [];
          answer.on('data', (chunk: Buffer) => chunks.push(chunk));
          answer.on('error', reject);
          answer.on('end', () =>
            resolve({ status: answer.statusCode ?? 0, body: Buffer.concat(chunks) }),
          );
        },
      );
      sent.on('error', reject);
      sent.end(payload);
    });
  }

  async #ok(method: string, path: string, body?: unknown): Promise<Buffer> {
    const answer = await this.send(method, path, body);
    if (answer.status < 300) return answer.body;
    const fault = JSON.parse(answer.body.toString()) as { fault_message?: string };
    throw new MiniVmError(answer.status, fault.fault_message ?? answer.body.toString());
  }

  async #json<T>(method: string, path: string, body?: unknown): Promise<T> {
    return JSON.parse((await this.#ok(method, path, body)).toString()) as T;
  }

  async configure(config: { memoryMib: number; track: boolean; vcpus?: number }): Promise<void> {
    await this.#ok('PUT', '/machine-config', {
      vcpu_count: config.vcpus ?? 1,
      mem_size_mib: config.memoryMib,
      track_dirty_pages: config.track,
    });
  }
  async start(): Promise<void> {
    await this.#ok('PUT', '/actions', { action_type: 'InstanceStart' });
  }
  async pause(): Promise<void> {
    await this.#ok('PATCH', '/vm', { state: 'Paused' });
  }
  async resume(): Promise<void> {
    await this.#ok('PATCH', '/vm', { state: 'Resumed' });
  }
  /** Without `memFilePath`: VM state only (dialects `aenv`, `e2b`). */
  async createSnapshot(o: {
    type: 'Full' | 'Diff';
    snapshotPath: string;
    memFilePath?: string;
  }): Promise<void> {
    await this.#ok('PUT', '/snapshot/create', {
      snapshot_type: o.type,
      snapshot_path: o.snapshotPath,
      ...(o.memFilePath === undefined ? {} : { mem_file_path: o.memFilePath }),
    });
  }
  async loadSnapshot(o: RestoreOptions): Promise<void> {
    await this.#ok('PUT', '/snapshot/load', {
      snapshot_path: o.snapshotPath,
      mem_backend: { backend_type: o.backend ?? 'File', backend_path: o.memoryPath },
      track_dirty_pages: o.track ?? true,
      resume_vm: o.resume ?? false,
    });
  }
  epoch(action: 'begin' | 'commit' | 'abort'): Promise<EpochStatus> {
    return this.#json('PUT', '/vm/dirty-epoch', { action });
  }

  info(): Promise<MiniVmInfo> {
    return this.#json('GET', '/minivm');
  }
  async setRegions(regions: readonly RegionOption[]): Promise<void> {
    await this.#ok('PUT', '/minivm/regions', { regions: regions.map(regionBody) });
  }
  /** Sets what the guest does and returns at once; `programDone` waits. */
  program(program: ProgramBody): Promise<{ guestPages: number; devicePages: number }> {
    return this.#json('PUT', '/minivm/program', program);
  }
  async stopProgram(): Promise<void> {
    await this.#ok('DELETE', '/minivm/program');
  }
  programDone(timeoutMs = 60_000): Promise<GuestCounters> {
    return this.#json('GET', `/minivm/program/done?timeoutMs=${timeoutMs}`);
  }
  /** Resolves when a program has finished this many passes (counted since it was set). */
  waitForPasses(passes: number, timeoutMs = 60_000): Promise<GuestCounters> {
    return this.#json('GET', `/minivm/program/done?passes=${passes}&timeoutMs=${timeoutMs}`);
  }
  /** Runs a program that ends, to its end. */
  async run(program: ProgramBody, timeoutMs = 60_000): Promise<GuestCounters> {
    await this.program(program);
    return this.programDone(timeoutMs);
  }
  counters(): Promise<GuestCounters> {
    return this.#json('GET', '/minivm/counters');
  }
  async resetGap(): Promise<void> {
    await this.#ok('DELETE', '/minivm/gap');
  }
  /** A device's write of these bytes. */
  async writeBytes(imageOffset: number, data: Uint8Array): Promise<void> {
    await this.#ok('PUT', `/minivm/bytes?offset=${imageOffset}`, data);
  }
  /** A device fills whole pages with bytes that depend on the page and the value. */
  async deviceWrites(body: DeviceWriteBody): Promise<void> {
    await this.#ok('PUT', '/minivm/device-writes', body);
  }
  readBytes(imageOffset: number, length: number): Promise<Buffer> {
    return this.#ok('GET', `/minivm/bytes?offset=${imageOffset}&length=${length}`);
  }
  /** One 64-bit hash per page, the same in every small VM. */
  async hashes(firstPage: number, pageCount: number): Promise<BigUint64Array> {
    return words(
      await this.#ok('GET', `/minivm/hashes?firstPage=${firstPage}&pageCount=${pageCount}`),
    );
  }
  /** A page set as bitmap words, region after region. */
  async set(name: PageSet): Promise<BigUint64Array> {
    return words(await this.#ok('GET', `/minivm/sets/${name}`));
  }
  /** Gives pages back to the host, as a balloon does: they read zero until written again. */
  async removePages(body: RemovalBody): Promise<void> {
    await this.#ok('POST', '/minivm/removals', body);
  }
  async setUnreadable(page: number, unreadable = true): Promise<void> {
    await this.#ok('PUT', '/minivm/unreadable', { page, unreadable });
  }
  addRegion(region: RegionOption): Promise<MiniVmInfo> {
    return this.#json('POST', '/minivm/regions', regionBody(region));
  }
  dropRegion(): Promise<MiniVmInfo> {
    return this.#json('DELETE', '/minivm/regions');
  }
  async fault(rule: FaultBody): Promise<void> {
    await this.#ok('POST', '/minivm/faults', rule);
  }
  async clearFaults(): Promise<void> {
    await this.#ok('DELETE', '/minivm/faults');
  }
  /** Every request the VMM's API got so far, control requests left out. */
  requests(): Promise<LoggedRequest[]> {
    return this.#json('GET', '/minivm/requests');
  }
  async clearRequests(): Promise<void> {
    await this.#ok('DELETE', '/minivm/requests');
  }
}

export interface RegionOption {
  readonly guestAddress: bigint;
  readonly bytes: number;
}

export interface RestoreOptions {
  readonly snapshotPath: string;
  /** `Uffd`: `memoryPath` is the page-fault handler's socket. Default `File`. */
  readonly backend?: 'File' | 'Uffd';
  readonly memoryPath: string;
  /** Default true. */
  readonly track?: boolean;
  /** Default false: the VM is left paused. */
  readonly resume?: boolean;
}

const regionBody = (region: RegionOption): { guestAddress: string; bytes: number } => ({
  guestAddress: String(region.guestAddress),
  bytes: region.bytes,
});

function words(bytes: Buffer): BigUint64Array {
  const out = new BigUint64Array(bytes.length / 8);
  new Uint8Array(out.buffer).set(bytes);
  return out;
}
