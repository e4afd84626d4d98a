import { Failure } from '../result.ts';
import type { CaptureId, VmId } from '../units.ts';

/** Everything that node.db can refuse or fail with. `message` says what and where. */
export type NodeDbError =
  /** The file cannot be opened, read or written: disk full, read-only folder, I/O error. */
  | { readonly kind: 'node-db-io'; readonly message: string; readonly code?: string }
  /** Another process (most likely another daemon) has the file. */
  | { readonly kind: 'node-db-locked'; readonly message: string }
  /** Written by a newer version. */
  | { readonly kind: 'node-db-newer'; readonly message: string }
  | { readonly kind: 'node-db-corrupt'; readonly message: string }
  | { readonly kind: 'vm-unknown'; readonly message: string; readonly vmId: VmId }
  | { readonly kind: 'vm-exists'; readonly message: string; readonly vmId: VmId }
  /** The process is attached, as this VM. */
  | { readonly kind: 'vm-attached'; readonly message: string; readonly vmId: VmId }
  /** One of the VM's captures is active, or has not resumed it yet. HTTP 409. */
  | {
      readonly kind: 'capture-running';
      readonly message: string;
      readonly runningCaptureId: CaptureId;
    }
  | { readonly kind: 'capture-unknown'; readonly message: string; readonly captureId: CaptureId }
  /** The event is not in the transition table for the capture's recorded step. */
  | { readonly kind: 'capture-step'; readonly message: string; readonly step: string }
  | { readonly kind: 'idempotency-conflict'; readonly message: string }
  /** One layer more would pass the hard limit. */
  | { readonly kind: 'chain-too-deep'; readonly message: string; readonly depth: number }
  /** The set's page count is not the VM's, or a bitmap is malformed. */
  | { readonly kind: 'layout-changed'; readonly message: string }
  /** The intent says widen and the set that came was not widened. */
  | { readonly kind: 'set-not-widened'; readonly message: string }
  | { readonly kind: 'layer-unknown'; readonly message: string }
  /** A layer that contradicts what node.db knows: another digest under its uuid, a wrong parent. */
  | { readonly kind: 'layer-mismatch'; readonly message: string }
  /** The VM's memory parent is not what the compaction covers. */
  | { readonly kind: 'chain-moved'; readonly message: string }
  | { readonly kind: 'compaction-unknown'; readonly message: string }
  | { readonly kind: 'compaction-running'; readonly message: string };

export type NodeDbFailureKind = NodeDbError['kind'];

export const retryable = {
  'node-db-io': true,
  'node-db-locked': true,
  'node-db-newer': false,
  'node-db-corrupt': false,
  'vm-unknown': false,
  'vm-exists': false,
  'vm-attached': false,
  'capture-running': true,
  'capture-unknown': false,
  'capture-step': false,
  'idempotency-conflict': false,
  'chain-too-deep': true,
  'layout-changed': false,
  'set-not-widened': false,
  'layer-unknown': false,
  'layer-mismatch': false,
  'chain-moved': true,
  'compaction-unknown': false,
  'compaction-running': true,
} satisfies Record<NodeDbFailureKind, boolean>;

/** Leaves the transaction it is thrown in: everything in it is undone. */
export function refuse(detail: NodeDbError): never {
  throw new Failure<NodeDbError>(detail);
}
