/**
 * A real server on a real socket, over a scripted `Captures`: what is tested here is HTTP. Whole
 * captures through the API are in test/cli and test/capture.
 */
import { mkdtempSync, mkdirSync, rmSync } from 'node:fs';
import { request as httpRequest, type IncomingHttpHeaders } from 'node:http';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { MeterProvider } from '@opentelemetry/sdk-metrics';
import { createApi } from '../../src/api/app.ts';
import type { GcControl } from '../../src/api/gc.ts';
import { listen } from '../../src/api/server.ts';
import type {
  CaptureEvent,
  CaptureRequest,
  Captures,
  CaptureView,
  VmView,
} from '../../src/capture/types.ts';
import type { Catalog } from '../../src/catalog/catalog.ts';
import { systemClock } from '../../src/clock.ts';
import { configOf, type ConfigInput } from '../../src/config/load.ts';
import { createLogger } from '../../src/observability/log.ts';
import { createMetrics } from '../../src/observability/metrics.ts';
import { captureId, vmId } from '../../src/units.ts';

export const vmOf = (name: string, socketPath: string): VmView => ({
  vmId: vmId(name),
  socketPath,
  pid: 1,
  dialect: 'e2b',
  vmmVersion: '1.10.0',
  trackingMode: 'mincore',
  epoch: 0,
  memoryParent: null,
  launchParent: null,
  chainDepth: 0,
  imageBytes: null,
  pausedByUs: false,
  captureId: null,
  state: 'attached',
});

export const captureOf = (id: string, vm: string): CaptureView => ({
  captureId: captureId(id),
  vmId: vmId(vm),
  status: 'running',
  stage: 'read',
  createdAtMs: 1,
  endedAtMs: null,
  result: null,
  stages: [],
  failure: null,
  vmRunning: false,
});

/** Captures that do nothing but remember what they were asked for. */
export class ScriptedCaptures implements Captures {
  readonly vms = new Map<string, VmView>();
  readonly captures = new Map<string, CaptureView>();
  readonly requests: CaptureRequest[] = [];
  readonly events: CaptureEvent[] = [];
  attachFailure: { kind: string; message: string } | null = null;
  /** When set, starting a capture waits for it. */
  gate: Promise<void> | null = null;
  watchersEnded = 0;

  async attach(request: { socketPath: string; vmId?: string | undefined }) {
    await Promise.resolve();
    if (this.attachFailure !== null) return { ok: false as const, error: this.attachFailure };
    const vm = vmOf(request.vmId ?? 'vm-1', request.socketPath);
    this.vms.set(vm.vmId, vm);
    return { ok: true as const, value: vm };
  }
  listVms() {
    return [...this.vms.values()];
  }
  getVm(id: string) {
    return this.vms.get(id);
  }
  detach(id: string) {
    this.vms.delete(id);
    return Promise.resolve({ ok: true as const, value: null });
  }
  async startCapture(id: string, request: CaptureRequest) {
    this.requests.push(request);
    if (this.gate !== null) await this.gate;
    const running = [...this.captures.values()].find((c) => c.vmId === id);
    if (running !== undefined) {
      const facts = { captureId: running.captureId };
      const message = `capture ${running.captureId} of this VM is running`;
      return { ok: false as const, error: { kind: 'capture-running', message, facts } };
    }
    const view = captureOf(`c-${this.requests.length}`, id);
    this.captures.set(view.captureId, view);
    return { ok: true as const, value: view };
  }
  getCapture(id: string) {
    return this.captures.get(id);
  }
  epochsOf() {
    return new Map();
  }
  listCaptures(vm?: string) {
    return [...this.captures.values()].filter((c) => vm === undefined || c.vmId === vm);
  }
  cancelCapture(id: string) {
    const view = { ...captureOf(id, 'vm-1'), status: 'aborted' as const };
    this.captures.set(id, view);
    return Promise.resolve({ ok: true as const, value: view });
  }
  async *watch(_id: string, signal: AbortSignal) {
    try {
      yield* this.events;
      if (this.gate === null) return;
      await Promise.race([
        this.gate,
        new Promise<void>((resolve) => signal.addEventListener('abort', () => resolve())),
      ]);
    } finally {
      this.watchersEnded++;
    }
  }
  waitFor(id: string) {
    return Promise.resolve(captureOf(id, 'vm-1'));
  }
  fork() {
    return Promise.resolve({
      ok: false as const,
      error: { kind: 'busy', message: 'too many captures' },
    });
  }
  close() {
    return Promise.resolve();
  }
}

export interface Answer {
  readonly status: number;
  readonly headers: IncomingHttpHeaders;
  readonly text: string;
  readonly json: Record<string, unknown>;
}

export interface Harness extends AsyncDisposable {
  readonly captures: ScriptedCaptures;
  readonly socketPath: string;
  readonly vmRoot: string;
  readonly folder: string;
  readonly logged: string[];
  call(method: string, path: string, body?: unknown, headers?: object): Promise<Answer>;
}

export function call(
  socketPath: string,
  method: string,
  path: string,
  body?: unknown,
  headers: object = {},
): Promise<Answer> {
  const text = body === undefined ? '' : typeof body === 'string' ? body : JSON.stringify(body);
  const type = body === undefined ? {} : { 'content-type': 'application/json' };
  return new Promise((resolve, reject) => {
    const options = { socketPath, method, path, headers: { ...type, ...headers } };
    const request = httpRequest(options, (response) => {
      const chunks: Buffer[] = [];
      response.on('data', (chunk: Buffer) => chunks.push(chunk));
      response.on('end', () => {
        const answered = Buffer.concat(chunks).toString();
        const isJson = /json/.test(response.headers['content-type'] ?? '');
        const json = (isJson ? JSON.parse(answered) : {}) as Record<string, unknown>;
        const { statusCode: status = 0, headers: answeredHeaders } = response;
        resolve({ status, headers: answeredHeaders, text: answered, json });
      });
    });
    request.on('error', reject);
    request.end(text);
  });
}

const noGc: GcControl = {
  plan: () => Promise.resolve({ ok: true, value: { artifacts: 0 } }),
  run: ({ force }) => Promise.resolve({ ok: true, value: { forced: force } }),
};

export async function startHarness(
  input: ConfigInput = {},
  catalog: Catalog | null = null,
): Promise<Harness> {
  const folder = mkdtempSync(join(tmpdir(), 'varve-api-'));
  const vmRoot = join(folder, 'vms');
  mkdirSync(vmRoot);
  const socketPath = join(folder, 'api.sock');
  const config = configOf({
    ...input,
    server: { listen: 'off', socket: socketPath, ...input.server },
    paths: { state: folder, socket_roots: [vmRoot] },
  });
  const captures = new ScriptedCaptures();
  const logged: string[] = [];
  const api = createApi({
    config,
    captures,
    catalog: catalog ?? (undefined as unknown as Catalog),
    gc: noGc,
    metrics: createMetrics(new MeterProvider()),
    logger: createLogger({
      level: 'info',
      nodeId: 'n1',
      destination: { write: (line) => void logged.push(line) },
    }),
    clock: systemClock,
    version: '0.1.0',
    renderMetrics: () => Promise.resolve('# metrics\n'),
    readiness: () => Promise.resolve([{ name: 'catalog', ok: true, detail: '' }]),
  });
  const { server, auth } = config;
  const started = await listen({ server, hasTokens: auth.tokens.length > 0, fetch: api.fetch });
  if (!started.ok) throw new Error(started.error.message);
  return {
    captures,
    socketPath,
    vmRoot,
    folder,
    logged,
    call: (method, path, body, headers) => call(socketPath, method, path, body, headers),
    async [Symbol.asyncDispose]() {
      await started.value.close(0);
      rmSync(folder, { recursive: true });
    },
  };
}
