/** Another process that holds a lock on an SQLite file. */
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { createRequire } from 'node:module';
import { createInterface } from 'node:readline';

const driver = createRequire(import.meta.url).resolve('better-sqlite3');

const script = `
  const [path, begin, holdMs] = process.argv.slice(1);
  const db = new (require(${JSON.stringify(driver)}))(path);
  db.exec(begin);
  process.stdin.once('data', () => {
    db.exec('ROLLBACK');
    process.exit(0);
  });
  setTimeout(() => console.log('held'), Number(holdMs));
  console.log('locked');`;

export interface Locker extends AsyncDisposable {
  /** Resolves when it has had the lock for `holdMs`. It keeps it until it is told. */
  readonly held: Promise<void>;
  /** Makes it let go; resolves when it has. */
  end(): Promise<void>;
}

/**
 * Resolves when it has the lock.
 *
 * @param options.begin What takes the lock. Default: that of a writer.
 * @param options.holdMs When it says that it has held it, by its own clock. Default 0.
 */
export async function lockedBy(
  path: string,
  options: { readonly begin?: string; readonly holdMs?: number } = {},
): Promise<Locker> {
  const { begin = 'BEGIN IMMEDIATE', holdMs = 0 } = options;
  const child = spawn(process.execPath, ['-e', script, path, begin, String(holdMs)], {
    stdio: ['pipe', 'pipe', 'inherit'],
  });
  const exited = once(child, 'exit');
  const said = (word: string): Promise<void> =>
    new Promise((resolve, reject) => {
      lines.on('line', (line) => {
        if (line === word) resolve();
      });
      void exited.then(() => reject(new Error(`it ended without "${word}"`)));
    });
  const lines = createInterface({ input: child.stdout });
  const held = said('held');
  held.catch(() => undefined);
  await said('locked');
  const end = async (): Promise<void> => {
    if (!child.stdin.writableEnded) child.stdin.end('end\n');
    await exited;
  };
  return { held, end, [Symbol.asyncDispose]: end };
}
