import { defineConfig } from 'vitest/config';

// Workers are processes: the addon, SQLite and the small VM are used as the daemon uses them.
// Two at a time, since most tests start processes of their own and the build machines have two
// cores.
export default defineConfig({
  test: {
    include: ['test/**/*.test.ts'],
    pool: 'forks',
    maxWorkers: 2,
    // For hangs: tests take seconds, on a busy machine ten times as long.
    testTimeout: 180_000,
    hookTimeout: 180_000,
    teardownTimeout: 20_000,
  },
});
