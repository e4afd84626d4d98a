/** Size and digest of small files that are not guest memory. */
import { createHash } from 'node:crypto';
import { createReadStream } from 'node:fs';
import { bytes, digest, type Bytes, type Digest } from '../units.ts';

export interface FileFacts {
  readonly digest: Digest;
  readonly sizeBytes: Bytes;
}

export async function fileFacts(path: string): Promise<FileFacts> {
  const hash = createHash('sha256');
  let size = 0;
  for await (const chunk of createReadStream(path) as AsyncIterable<Buffer>) {
    hash.update(chunk);
    size += chunk.length;
  }
  return { digest: digest(`sha256:${hash.digest('hex')}`), sizeBytes: bytes(size) };
}

export function bytesFacts(content: Uint8Array): FileFacts {
  const hex = createHash('sha256').update(content).digest('hex');
  return { digest: digest(`sha256:${hex}`), sizeBytes: bytes(content.length) };
}
