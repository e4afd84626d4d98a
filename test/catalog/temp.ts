import { existsSync } from 'node:fs';
import { tmpdir } from 'node:os';

/** Where tests put files whose fsync nobody relies on: memory, where there is such a folder. */
export const fastFolder = existsSync('/dev/shm') ? '/dev/shm' : tmpdir();
