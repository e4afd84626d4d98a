import { getSystemErrorName } from 'node:util';

/** `ESRCH` for 3, … */
export function errnoName(error: number): string {
  try {
    return getSystemErrorName(-error);
  } catch {
    return `errno ${error}`;
  }
}
