/**
 * The Firecracker API over its Unix socket: each call a question with a time-out and a checked
 * answer. Once it is bound to an identity it talks to no other process, and a request that fails
 * because the VM is gone says so. A request that timed out may still take effect: its outcome is
 * unknown.
 */
import { err, ok, type Result } from '../result.ts';
import type { z } from 'zod';
import {
  faultBody,
  instanceInfo,
  machineConfig,
  memoryMappings,
  versionInfo,
  type InstanceInfo,
  type MachineConfig,
  type MemoryMappings,
  type RunState,
} from './answers.ts';
import { badAnswer, vmmError, type VmmError } from './errors.ts';
import { checked, parseExact } from './exact-json.ts';
import { KeptConnections, sendRequest, type VmmAnswer, type VmmRequest } from './http.ts';
import { identityError, type ProcessIdentity } from './identity.ts';

/** Milliseconds from connecting to the last byte of the answer. */
export interface VmmTimeouts {
  /** Questions that the VMM answers from memory. */
  readonly queryMs: number;
  /** Pause, resume, configuration. */
  readonly changeMs: number;
  /** Dirty sets and residency bitmaps. */
  readonly bulkMs: number;
  /** `snapshot/create` and `snapshot/load`; with a memory file they write or map all of it. */
  readonly snapshotMs: number;
}

export const defaultTimeouts: VmmTimeouts = {
  queryMs: 5_000,
  changeMs: 10_000,
  bulkMs: 30_000,
  snapshotMs: 120_000,
};

const SMALL_ANSWER_BYTES_MAX = 1024 * 1024;
const BULK_ANSWER_BYTES_MAX = 256 * 1024 * 1024;
/** As many as a dirty-set source asks at once. */
const KEPT_CONNECTIONS_MAX = 3;
/** A dying process closes its sockets just before its pidfd says so. */
const EXIT_GRACE_MS = 250;

export interface VmmClientOptions {
  readonly socketPath: string;
  readonly timeoutsMs?: Partial<VmmTimeouts>;
  /** Bound on a dirty set's JSON; 64 GiB as a bitmap takes at most 6 MiB. */
  readonly bulkAnswerBytesMax?: number;
}

export interface SnapshotCreate {
  readonly type: 'Full' | 'Diff';
  readonly snapshotPath: string;
  /** Left out: only the VM state is saved (dialects `aenv` and `e2b`). */
  readonly memFilePath?: string;
}

export interface SnapshotLoad {
  readonly snapshotPath: string;
  readonly memory: { readonly backend: 'File' | 'Uffd'; readonly path: string };
  /** Not saved in a snapshot: false means that this VM can never be captured in mode `dirty`. */
  readonly trackDirtyPages: boolean;
  readonly resume: boolean;
}

export class VmmClient {
  readonly socketPath: string;
  readonly timeoutsMs: VmmTimeouts;
  readonly #bulkBytesMax: number;
  #identity: ProcessIdentity | null = null;
  #kept: KeptConnections | undefined;

  constructor(options: VmmClientOptions) {
    this.socketPath = options.socketPath;
    this.timeoutsMs = { ...defaultTimeouts, ...options.timeoutsMs };
    this.#bulkBytesMax = options.bulkAnswerBytesMax ?? BULK_ANSWER_BYTES_MAX;
  }

  /** From now on: only this process. Its owner disposes it. */
  bind(identity: ProcessIdentity): void {
    this.#identity = identity;
  }

  /**
   * Keeps connections open between requests until disposed: connecting is a good part of a short
   * request's time, and a frozen VM waits for each.
   */
  keepConnections(): Disposable {
    const kept = new KeptConnections(KEPT_CONNECTIONS_MAX);
    this.#kept = kept;
    return {
      [Symbol.dispose]: () => {
        if (this.#kept === kept) this.#kept = undefined;
        kept[Symbol.dispose]();
      },
    };
  }

  info(signal: AbortSignal): Promise<Result<InstanceInfo, VmmError>> {
    return this.#get('/', instanceInfo, signal);
  }

  async state(signal: AbortSignal): Promise<Result<RunState, VmmError>> {
    const info = await this.info(signal);
    return info.ok ? ok(info.value.state) : info;
  }

  async version(signal: AbortSignal): Promise<Result<string, VmmError>> {
    const version = await this.#get('/version', versionInfo, signal);
    return version.ok ? ok(version.value.firecracker_version) : version;
  }

  machineConfig(signal: AbortSignal): Promise<Result<MachineConfig, VmmError>> {
    return this.#get('/machine-config', machineConfig, signal);
  }

  memoryMappings(signal: AbortSignal): Promise<Result<MemoryMappings, VmmError>> {
    return this.#get('/memory/mappings', memoryMappings, signal);
  }

  /** Only before boot. Fields that are left out keep their value. */
  patchMachineConfig(
    config: { readonly track_dirty_pages?: boolean; readonly mem_size_mib?: number },
    signal: AbortSignal,
  ): Promise<Result<void, VmmError>> {
    return this.#change('PATCH', '/machine-config', config, this.timeoutsMs.changeMs, signal);
  }

  putMachineConfig(
    config: {
      readonly vcpu_count: number;
      readonly mem_size_mib: number;
      readonly track_dirty_pages: boolean;
      readonly smt?: boolean;
    },
    signal: AbortSignal,
  ): Promise<Result<void, VmmError>> {
    return this.#change('PUT', '/machine-config', config, this.timeoutsMs.changeMs, signal);
  }

  /** Freezes the vCPUs. After any failure but a refusal the VM may be paused: resume it. */
  pause(signal: AbortSignal): Promise<Result<void, VmmError>> {
    return this.#change('PATCH', '/vm', { state: 'Paused' }, this.timeoutsMs.changeMs, signal);
  }

  resume(signal: AbortSignal): Promise<Result<void, VmmError>> {
    return this.#change('PATCH', '/vm', { state: 'Resumed' }, this.timeoutsMs.changeMs, signal);
  }

  createSnapshot(create: SnapshotCreate, signal: AbortSignal): Promise<Result<void, VmmError>> {
    const body = {
      snapshot_type: create.type,
      snapshot_path: create.snapshotPath,
      ...(create.memFilePath === undefined ? {} : { mem_file_path: create.memFilePath }),
    };
    return this.#change('PUT', '/snapshot/create', body, this.timeoutsMs.snapshotMs, signal);
  }

  async loadSnapshot(load: SnapshotLoad, signal: AbortSignal): Promise<Result<void, VmmError>> {
    const body = {
      snapshot_path: load.snapshotPath,
      mem_backend: { backend_type: load.memory.backend, backend_path: load.memory.path },
      resume_vm: load.resume,
    };
    const { snapshotMs } = this.timeoutsMs;
    const put = (more: Record<string, boolean>): Promise<Result<void, VmmError>> =>
      this.#change('PUT', '/snapshot/load', { ...body, ...more }, snapshotMs, signal);
    const loaded = await put({ track_dirty_pages: load.trackDirtyPages });
    if (loaded.ok || !saysUnknownField(loaded.error, 'track_dirty_pages')) return loaded;
    // Firecracker before 1.13 knows it by its older name; the refused body did nothing.
    return put({ enable_diff_snapshots: load.trackDirtyPages });
  }

  /** A small answer of any shape. */
  query<T>(path: string, schema: z.ZodType<T>, signal: AbortSignal): Promise<Result<T, VmmError>> {
    return this.#get(path, schema, signal);
  }

  /** A large answer as bytes, for `JsonScanner`. */
  async bulk(path: string, signal: AbortSignal): Promise<Result<Buffer, VmmError>> {
    const answer = await this.ask(
      {
        method: 'GET',
        path,
        timeoutMs: this.timeoutsMs.bulkMs,
        answerBytesMax: this.#bulkBytesMax,
      },
      signal,
    );
    if (!answer.ok) return answer;
    return isSuccess(answer.value.status)
      ? ok(answer.value.body)
      : err(this.#refusal(path, answer.value));
  }

  /** A state-changing request whose answer has no content that matters. */
  change(
    method: 'PUT' | 'PATCH',
    path: string,
    body: unknown,
    signal: AbortSignal,
  ): Promise<Result<void, VmmError>> {
    return this.#change(method, path, body, this.timeoutsMs.changeMs, signal);
  }

  /** Any request; the status is not looked at. Rejects with the signal's reason when aborted. */
  async ask(request: VmmRequest, signal: AbortSignal): Promise<Result<VmmAnswer, VmmError>> {
    const identity = this.#identity;
    if (identity !== null) {
      const check = request.method === 'GET' ? quickCheck(identity) : identity.check();
      if (check !== 'same') return err(identityError(identity, check));
    }
    const answer = await sendRequest(this.socketPath, request, signal, this.#kept);
    return answer.ok || identity === null ? answer : err(await explain(identity, answer.error));
  }

  /** A question of a schema; a status other than success is a refusal. */
  async #get<T>(
    path: string,
    schema: z.ZodType<T>,
    signal: AbortSignal,
  ): Promise<Result<T, VmmError>> {
    const answer = await this.ask(
      {
        method: 'GET',
        path,
        timeoutMs: this.timeoutsMs.queryMs,
        answerBytesMax: SMALL_ANSWER_BYTES_MAX,
      },
      signal,
    );
    if (!answer.ok) return answer;
    if (!isSuccess(answer.value.status)) return err(this.#refusal(path, answer.value));
    const what = `GET ${path} at ${this.socketPath}`;
    const parsed = parseExact(answer.value.body.toString('utf8'), what);
    return parsed.ok ? checked(schema, parsed.value, what) : parsed;
  }

  async #change(
    method: 'PUT' | 'PATCH',
    path: string,
    body: unknown,
    timeoutMs: number,
    signal: AbortSignal,
  ): Promise<Result<void, VmmError>> {
    const answer = await this.ask(
      { method, path, body, timeoutMs, answerBytesMax: SMALL_ANSWER_BYTES_MAX },
      signal,
    );
    if (!answer.ok) return answer;
    if (isSuccess(answer.value.status)) return ok(undefined);
    return err(this.#refusal(`${method} ${path}`, answer.value));
  }

  #refusal(what: string, answer: VmmAnswer): VmmError {
    const { socketPath } = this;
    const { status } = answer;
    if (status < 400) {
      return badAnswer(`${what} at ${socketPath}`, '', `has the unexpected status ${status}`);
    }
    const fault = faultText(answer.body);
    const message = `the VMM at ${socketPath} refused ${what} (${status}): ${fault}`;
    return vmmError('vmm-refused', message, { socketPath, status, fault });
  }
}

export function isSuccess(status: number): boolean {
  return status >= 200 && status < 300;
}

/** The VMM's words, or the start of whatever it said. */
export function faultText(body: Buffer): string {
  const text = body.subarray(0, 4096).toString('utf8').trim();
  const parsed = parseExact(text, '');
  const fault = parsed.ok ? faultBody.safeParse(parsed.value) : undefined;
  const words = fault?.success === true ? fault.data.fault_message : text;
  const line = words.replace(/\s+/g, ' ').slice(0, 500);
  return line === '' ? 'no reason given' : line;
}

function saysUnknownField(error: VmmError, field: string): boolean {
  return error.kind === 'vmm-refused' && (error.fault ?? '').includes(`unknown field \`${field}\``);
}

function quickCheck(identity: ProcessIdentity): 'same' | 'exited' {
  return identity.hasExited() ? 'exited' : 'same';
}

/** A connection that failed because the process is gone is reported as that. */
async function explain(identity: ProcessIdentity, error: VmmError): Promise<VmmError> {
  if (error.kind !== 'vmm-unreachable' && error.kind !== 'vmm-timeout') return error;
  let check = identity.check();
  if (check === 'same' && error.kind === 'vmm-unreachable') {
    const grace = AbortSignal.timeout(EXIT_GRACE_MS);
    await identity.onExit(grace).catch(() => undefined);
    check = identity.check();
  }
  return check === 'same' ? error : identityError(identity, check);
}
