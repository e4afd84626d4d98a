/** The last lines of a test run: what was skipped, what this machine lacks, and the counts. */
import { readFileSync } from 'node:fs';

/** Tests that are named one by one. */
const namedMax = 40;

let report;
try {
  report = JSON.parse(readFileSync(process.argv[2], 'utf8'));
} catch (error) {
  console.error(`The tests left no report: ${error.message}`);
  process.exit(1);
}

/** Why the small VM's guest cannot be a KVM guest here; empty where it can. */
async function whyNotKvm() {
  const chosen = process.env.MINIVM_BACKEND ?? 'auto';
  if (chosen === 'thread') return 'MINIVM_BACKEND=thread was asked for';
  try {
    const { loadNative } = await import('../dist/src/minivm/native.js');
    return loadNative().probeKvm();
  } catch (error) {
    return `it could not be tried (${error.message})`;
  }
}

const kvm = await whyNotKvm();
const lacking = [
  kvm === '' ? null : `no KVM guest was captured, only the thread guest: ${kvm}`,
  (process.env.VARVE_FIRECRACKER ?? '') !== ''
    ? null
    : 'no real Firecracker was tried: VARVE_FIRECRACKER names none (make test-vmm)',
].filter((line) => line !== null);

const skipped = report.testResults.flatMap((file) =>
  file.assertionResults.filter(({ status }) => ['pending', 'skipped', 'todo'].includes(status)),
);
for (const { fullName } of skipped.slice(0, namedMax)) console.log(`skipped: ${fullName.trim()}`);
if (skipped.length > namedMax) console.log(`skipped: ${skipped.length - namedMax} more`);
for (const line of lacking) console.log(line);

// A file that cannot even be loaded has no tests to count, and is a failure all the same.
const broken = report.testResults.filter(
  ({ status, assertionResults }) =>
    status === 'failed' && assertionResults.every((test) => test.status !== 'failed'),
).length;
if (broken > 0) console.log(`${broken} test files failed outside of their tests`);
const failed = report.numFailedTests + broken;
console.log(`${report.numPassedTests} passed, ${failed} failed, ${skipped.length} skipped`);
process.exit(failed > 0 ? 1 : 0);
