import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import type { FailureDetail, Result } from '../../src/result.ts';

/** The value, or a failed test that says why. */
export function value<T>(result: Result<T, FailureDetail>): T {
  if (!result.ok) throw new Error(`${result.error.kind}: ${result.error.message}`);
  return result.value;
}

interface Vectors {
  readonly layers: readonly {
    readonly file: string;
    readonly bytes: number;
    readonly sha256: string;
    readonly virtualSize: number;
    readonly uuid: string;
    readonly parentUuid: string | null;
    readonly flatSha256: string;
  }[];
  readonly stacks: readonly {
    readonly bottomToTop: readonly string[];
    readonly virtualSize: number;
    readonly flatSha256: string;
  }[];
}

const folder = join(import.meta.dirname, '..', 'vectors');
export const vectorPath = (file: string): string => join(folder, file);
export const vectors = JSON.parse(
  readFileSync(vectorPath('vectors.json'), 'utf8'),
) as unknown as Vectors;
