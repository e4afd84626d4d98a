/**
 * The configuration: types, defaults, checks and documentation all come from these schemas. Keys
 * are written in `snake_case` in the file and read as `camelCase` in code
 * (`config.pipeline.read.queueMax`).
 */
import { hostname } from 'node:os';
import { z } from 'zod';
import { CHAIN_LAYERS_MAX } from '../units.ts';
import type { Camelized } from './camel.ts';
import { pipelineSection } from './pipeline.schema.ts';
import { absolutePath, byteSize, duration, secretText, valueKinds } from './values.ts';

/** `host:port`; the host of an IPv6 address stands in brackets. */
const listenPattern = /^(\[[0-9a-fA-F:]+\]|[A-Za-z0-9.-]+):(\d{1,5})$/;

function listenAddress() {
  const schema = z.string().refine((text) => {
    const match = listenPattern.exec(text);
    return text === 'off' || (match !== null && Number(match[2]) <= 65535);
  }, "must be host:port, such as '127.0.0.1:7070', or 'off'");
  valueKinds.add(schema, { written: "host:port, or 'off'" });
  return schema;
}

const server = z
  .strictObject({
    listen: listenAddress()
      .prefault('127.0.0.1:7070')
      .describe(
        "TCP address of the HTTP API, or 'off'. Anything but a loopback address needs " +
          '[[auth.tokens]].',
      ),
    socket: absolutePath()
      .or(z.literal('off'))
      .prefault('/run/varve/varve.sock')
      .describe(
        "Unix socket of the HTTP API, mode 0660, or 'off'. Its folder is made if it is missing.",
      ),
    body_max: byteSize({ min: '1KiB', max: '16MiB' })
      .prefault('1MiB')
      .describe('Largest request body that is read; counted in bytes received, not as announced.'),
    request_timeout: duration({ min: '1s', max: '10m' })
      .prefault('30s')
      .describe('How long a client may take to send its whole request.'),
    shutdown_grace: duration({ max: '10m' })
      .prefault('20s')
      .describe('How long running captures may go on after SIGTERM before they are aborted.'),
  })
  .describe('Where the daemon listens.');

const node = z
  .strictObject({
    id: z
      .string()
      .regex(/^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$/, { error: 'must be a plain name' })
      .optional()
      .describe('Name of this host in the catalog; must be unique in a cluster and never change.'),
  })
  .transform((value) => ({ id: value.id ?? hostname() }))
  .describe('This host. Without `id` the host name is used.');

const paths = z
  .strictObject({
    state: absolutePath()
      .prefault('/var/lib/varve')
      .describe('Folder of node.db, the SQLite catalog and everything below that has no own key.'),
    layers: absolutePath()
      .optional()
      .describe('Folder of local layers. Best on the same filesystem as `artifacts` (hard links).'),
    artifacts: absolutePath().optional().describe('Folder of the file artifact store.'),
    staging: absolutePath()
      .optional()
      .describe(
        'Folder where VMMs write their state files during a capture. The VMM processes need ' +
          'write permission there.',
      ),
    socket_roots: z
      .array(absolutePath())
      .min(1)
      .prefault(['/run/firecracker', '/run/varve/vms', '/srv/jailer'])
      .describe('API sockets of VMs must lie under one of these folders, symbolic links resolved.'),
  })
  .transform((value) => ({
    ...value,
    layers: value.layers ?? `${value.state}/layers`,
    artifacts: value.artifacts ?? `${value.state}/artifacts`,
    staging: value.staging ?? `${value.state}/staging`,
  }))
  .describe(
    'Folders. `layers`, `artifacts` and `staging` default to folders of those names in `state`.',
  );

const memorySnapshot = z
  .strictObject({
    tracking_mode: z
      .enum(['mincore', 'dirty', 'pagemap'])
      .prefault('mincore')
      .describe(
        'Where the dirty set comes from: `mincore` (resident pages), `dirty` (the dirty bitmaps ' +
          'of KVM and the VMM), `pagemap` (file-backed restores: private pages). Attach can ' +
          'override it.',
      ),
    tracking_shadow: z
      .enum(['off', 'pagemap'])
      .prefault('off')
      .describe(
        'A second source that each capture in mode `dirty` is compared with. `pagemap`: the page ' +
          'tables of VMs of the dialects `aenv` and `e2b` that were restored from a memory file. ' +
          'Pages that the VMM missed are captured all the same, counted and logged; the scan is ' +
          'part of the frozen time.',
      ),
    compression: z
      .enum(['none', 'lz4', 'zstd'])
      .prefault('none')
      .describe('Compression of new layers; anything but `none` writes ZFile.'),
    block_bytes: byteSize({ min: '4KiB', max: '32KiB' })
      .refine((size) => (size & (size - 1)) === 0, 'must be a power of two')
      .prefault('4KiB')
      .describe('Block size of compressed layers. Ignored when `compression` is `none`.'),
    dedup: z
      .enum(['auto', 'off', 'parent'])
      .prefault('auto')
      .describe(
        'Drop selected pages that equal what the memory parent reads there: `auto` does it where ' +
          'the source does not clear its dirty set, `parent` always, `off` never.',
      ),
  })
  .describe('What is captured of the memory of a VM, and how layers are written.');

const capture = z
  .strictObject({
    resume_after: z
      .enum(['publish', 'commit', 'copy'])
      .prefault('publish')
      .describe('Which step the VM stays paused for. `copy` freezes it the shortest.'),
    pause_deadline: duration({ min: '10ms', max: '1h' })
      .prefault('30s')
      .describe('A VM frozen for longer than this makes its capture abort and the VM resume.'),
    timeout: duration({ min: '1s', max: '24h' })
      .prefault('15m')
      .describe('A capture that has not committed by then aborts.'),
    job_retention: duration({ min: '1m' })
      .prefault('30d')
      .describe(
        'How long captures are shown after they were published or aborted, and their idempotency ' +
          'keys answered. Unfinished ones are never forgotten.',
      ),
    in_flight_max: z
      .int()
      .min(1)
      .max(1024)
      .prefault(16)
      .describe('Captures of all VMs that may be unfinished at once; more are refused as busy.'),
    state_max: byteSize({ min: '4KiB', max: '4GiB' })
      .prefault('64MiB')
      .describe('Largest VM state file that is taken from a VMM.'),
    verify: z
      .strictObject({
        every: z
          .int()
          .min(0)
          .max(1_000_000)
          .prefault(0)
          .describe(
            'After this many captures of a VM, one more that compares every page of the paused VM ' +
              'with its layers. Its snapshot is retired unless pages had been lost. 0: never.',
          ),
      })
      .prefault({})
      .describe(
        'Trust in dirty sets is checked by captures of their own, with a pause of their own.',
      ),
  })
  .describe('The run of one capture. Requests can override `resume_after` and `pause_deadline`.');

const vmm = z
  .strictObject({
    request_timeout: duration({ min: '100ms', max: '10m' })
      .prefault('5s')
      .describe(
        'How long a VMM may take to answer; at least 30 s for dirty sets. Not for snapshot ' +
          'creation and load.',
      ),
    snapshot_timeout: duration({ min: '100ms', max: '1h' })
      .prefault('60s')
      .describe('How long a VMM may take to create or load a snapshot.'),
  })
  .describe('Patience with the HTTP APIs of VMMs.');

const lineage = z
  .strictObject({
    advance: z
      .boolean()
      .prefault(true)
      .describe(
        'Each committed capture becomes the memory parent of the next. `false`: layers stay ' +
          'relative to the launch parent, and their dirty set only grows.',
      ),
    max_chain: z
      .int()
      .min(2)
      .max(CHAIN_LAYERS_MAX)
      .prefault(32)
      .describe(
        'Chain depth above which layers are merged, outside the pause. 255 is a hard limit.',
      ),
  })
  .describe('How epochs build chains.');

const catalog = z
  .strictObject({
    url: z
      .string()
      .regex(/^(sqlite:\/|postgres(ql)?:\/\/)/, {
        error: "must be 'sqlite:/absolute/path' or 'postgres://host/database'",
      })
      .refine((url) => !hasPassword(url), 'must not hold a password: use `password`')
      .optional()
      .describe('Without it, `sqlite:` and catalog.db in `paths.state`.'),
    password: secretText(1).optional().describe('Password of a PostgreSQL catalog.'),
    pool_max: z
      .int()
      .min(1)
      .max(100)
      .prefault(8)
      .describe('Connections to PostgreSQL. SQLite always has one.'),
    connect_timeout: duration({ min: '100ms', max: '1m' })
      .prefault('3s')
      .describe('How long connecting to PostgreSQL may take.'),
    statement_timeout: duration({ min: '100ms', max: '10m' })
      .prefault('10s')
      .describe('How long one statement may run on PostgreSQL.'),
    lock_timeout: duration({ min: '100ms', max: '5m' })
      .prefault('10s')
      .describe(
        'How long a transaction is retried on locks and conflicts. The daemon is not blocked ' +
          'meanwhile.',
      ),
    migrations: z
      .enum(['apply', 'check'])
      .prefault('apply')
      .describe('What to do at start when migrations are missing: apply them, or refuse to start.'),
  })
  .describe('The database of the catalog.');

function hasPassword(url: string): boolean {
  return URL.canParse(url) && new URL(url).password !== '';
}

const gc = z
  .strictObject({
    interval: duration()
      .prefault('10m')
      .describe("Time between scheduled collections; '0s' leaves only those asked for."),
    batch_max: z
      .int()
      .min(1)
      .max(10_000)
      .prefault(200)
      .describe('Most rows that one GC transaction condemns or trims.'),
    mass_delete_share: z
      .number()
      .min(0)
      .max(1)
      .prefault(0.2)
      .describe(
        'A run that would delete more than this share of all artifacts stops unless forced.',
      ),
    retention: duration({ min: '1m' })
      .prefault('7d')
      .describe('How long closed holds and retired snapshots are kept as records.'),
  })
  .describe('Garbage collection.');

const token = z
  .strictObject({
    name: z.string().min(1).max(64).describe('Named in logs in place of the token.'),
    scopes: z
      .array(z.enum(['read', 'capture', 'admin']))
      .min(1)
      .describe('`admin` implies `capture`, `capture` implies `read`.'),
    token: secretText(16).optional().describe('The token itself.'),
    token_sha256: z
      .string()
      .regex(/^[0-9a-f]{64}$/, { error: 'must be 64 lowercase hex digits' })
      .optional()
      .describe('SHA-256 of the token, so that the file does not hold it.'),
  })
  .refine((value) => (value.token === undefined) !== (value.token_sha256 === undefined), {
    error: 'needs exactly one of `token` and `token_sha256`',
  });

const auth = z
  .strictObject({
    tokens: z
      .array(token)
      .max(256)
      .prefault([])
      .describe(
        'Bearer tokens. None: everybody who reaches the socket or loopback port may do all.',
      ),
  })
  .describe('Who may call the API.');

const observability = z
  .strictObject({
    log_level: z
      .enum(['trace', 'debug', 'info', 'warn', 'error', 'fatal'])
      .prefault('info')
      .describe('Lowest level of the JSON log lines on standard output.'),
    otlp_endpoint: z
      .url({ protocol: /^https?$/, error: 'must be an http(s) URL' })
      .optional()
      .describe('OTLP/HTTP collector that metrics and traces are pushed to; none without it.'),
    otlp_interval: duration({ min: '1s', max: '1h' })
      .prefault('15s')
      .describe('Time between pushes of metrics.'),
    trace_share: z
      .number()
      .min(0)
      .max(1)
      .prefault(1)
      .describe('Share of captures that are traced.'),
  })
  .describe('Logs, metrics, traces. Prometheus text is always at /metrics.');

/** The whole file. Sections that are missing have their defaults. */
export const configSchema = z
  .strictObject({
    server: server.prefault({}),
    node: node.prefault({}),
    paths: paths.prefault({}),
    memory_snapshot: memorySnapshot.prefault({}),
    capture: capture.prefault({}),
    vmm: vmm.prefault({}),
    pipeline: pipelineSection.prefault({}),
    lineage: lineage.prefault({}),
    catalog: catalog.prefault({}),
    gc: gc.prefault({}),
    auth: auth.prefault({}),
    observability: observability.prefault({}),
  })
  .transform((value) => ({
    ...value,
    catalog: {
      ...value.catalog,
      url: value.catalog.url ?? `sqlite:${value.paths.state}/catalog.db`,
    },
  }));

/**
 * A parsed configuration: frozen, with camelCase keys, sizes in bytes, durations in
 * milliseconds.
 */
export type Config = Camelized<z.output<typeof configSchema>>;
export type StageName = Exclude<
  keyof Config['pipeline'],
  'workers' | 'slabBudget' | 'slabBytes' | 'precopy'
>;
/** A configuration as written in a file. */
export type ConfigInput = z.input<typeof configSchema>;
