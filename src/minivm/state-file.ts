import { createHash } from 'node:crypto';
import { closeSync, fsyncSync, openSync, readFileSync, writeSync } from 'node:fs';
import { z } from 'zod';
import { crc64 } from '../crc64.ts';
import { VmmFault } from './answer.ts';

/**
 * The VM state file, little-endian: magic (8 bytes), version (u32), header length (u32), header
 * (JSON), the vCPU as its backend saved it, the device window (mailbox with the guest's counter and
 * progress, pace, page list), and the SHA-256 of everything before it, checked before any of it is
 * believed.
 */
const MAGIC = 'VARVEMVM';
const VERSION = 1;
const FIXED_BYTES = 16;
const DIGEST_BYTES = 32;
const STATE_BYTES_MAX = 64 * 1024 * 1024;

export const machineConfig = z.strictObject({
  vcpu_count: z.int().min(1).max(32),
  mem_size_mib: z
    .int()
    .min(1)
    .max(1024 * 1024),
  smt: z.boolean().default(false),
  track_dirty_pages: z.boolean().default(false),
  huge_pages: z.enum(['None']).default('None'),
  cpu_template: z.string().optional(),
});
export type MachineConfig = z.infer<typeof machineConfig>;

const stateHeader = z.strictObject({
  vmm_version: z.string(),
  backend: z.enum(['kvm', 'thread']),
  page_size: z.literal(4096),
  machine_config: machineConfig,
  regions: z
    .array(z.strictObject({ guest_address: z.string().regex(/^\d{1,20}$/), bytes: z.int().min(1) }))
    .min(1),
  vcpu_bytes: z.int().min(0),
  window_bytes: z.int().min(0),
});
export type StateHeader = z.infer<typeof stateHeader>;

export interface VmStateFile {
  readonly header: StateHeader;
  readonly vcpu: Buffer;
  readonly window: Buffer;
}

export function encodeState(state: VmStateFile): Buffer {
  const header = Buffer.from(JSON.stringify(state.header));
  const fixed = Buffer.alloc(FIXED_BYTES);
  fixed.write(MAGIC, 'latin1');
  fixed.writeUInt32LE(VERSION, 8);
  fixed.writeUInt32LE(header.length, 12);
  const body = Buffer.concat([fixed, header, state.vcpu, state.window]);
  return Buffer.concat([body, createHash('sha256').update(body).digest()]);
}

/** @param o `summed`: it ends with its CRC-64 besides, as Firecracker's does */
export function writeState(path: string, state: VmStateFile, o = { summed: false }): void {
  const data = o.summed ? withSum(encodeState(state)) : encodeState(state);
  const fd = openSync(path, 'w', 0o644);
  try {
    for (let done = 0; done < data.length;) done += writeSync(fd, data, done);
    fsyncSync(fd);
  } finally {
    closeSync(fd);
  }
}

const SUM_BYTES = 8;

function withSum(data: Buffer): Buffer {
  const sum = Buffer.alloc(SUM_BYTES);
  sum.writeBigUInt64LE(crc64(data));
  return Buffer.concat([data, sum]);
}

export function decodeState(bytes: Buffer, path: string): VmStateFile {
  const data = crc64(bytes) === 0n ? bytes.subarray(0, -SUM_BYTES) : bytes;
  const bad = (why: string): VmmFault => new VmmFault(`The VM state file ${path} ${why}`);
  if (data.length > STATE_BYTES_MAX) throw bad('is too long');
  if (data.length < FIXED_BYTES + DIGEST_BYTES) throw bad('is too short');
  if (data.toString('latin1', 0, 8) !== MAGIC) throw bad('is not a state file of this VMM');
  if (data.readUInt32LE(8) !== VERSION) throw bad(`has version ${data.readUInt32LE(8)}`);
  const end = data.length - DIGEST_BYTES;
  const sum = createHash('sha256').update(data.subarray(0, end)).digest();
  if (!sum.equals(data.subarray(end))) throw bad('is damaged: its checksum does not fit');
  const vcpuAt = FIXED_BYTES + data.readUInt32LE(12);
  if (vcpuAt > end) throw bad('is damaged: its header is too long');
  const parsed = stateHeader.safeParse(JSON.parse(data.toString('utf8', FIXED_BYTES, vcpuAt)));
  if (!parsed.success) throw bad(`has a wrong header: ${z.prettifyError(parsed.error)}`);
  const header = parsed.data;
  const windowAt = vcpuAt + header.vcpu_bytes;
  if (windowAt + header.window_bytes !== end) throw bad('is damaged: its parts do not fit');
  return { header, vcpu: data.subarray(vcpuAt, windowAt), window: data.subarray(windowAt, end) };
}

export function readState(path: string): VmStateFile {
  let data: Buffer;
  try {
    data = readFileSync(path);
  } catch (error) {
    throw new VmmFault(`Cannot open the VM state file ${path}: ${String(error)}`);
  }
  return decodeState(data, path);
}
