/** The table of a self-test. */
import type { BinaryOutcome } from './run.ts';
import type { CaseOutcome } from './run-case.ts';

/** In short: what happened, and why. */
export function verdictText({ verdict, reason }: CaseOutcome): string {
  switch (verdict) {
    case 'exact':
      return 'exact';
    case 'refused':
      return `refused (${reason?.kind ?? ''})`;
    case 'skipped':
      return `not tried: ${reason?.message ?? ''}`;
    case 'differs':
      return `DIFFERS: ${reason?.message ?? ''}`;
    case 'failed':
      return `FAILED: ${reason?.kind ?? ''}: ${reason?.message ?? ''}`;
  }
}

const ms = (value: number): string => `${value.toFixed(value < 10 ? 1 : 0)} ms`;

/** Head and one row per case. Frozen times: of the first capture and of the second. */
export function selftestRows({ cases }: BinaryOutcome): readonly (readonly string[])[] {
  return cases.map((one) => [
    one.name,
    ...[one.captures[0], one.captures[1]].map((cost) =>
      cost === undefined ? '-' : ms(cost.frozenMs),
    ),
    one.captures[1] === undefined ? '-' : ms(one.captures[1].stoodStillMs),
    one.captures[1] === undefined ? '-' : String(one.captures[1].selectedPages),
    verdictText(one),
  ]);
}

export const selftestHead = ['CASE', 'FIRST', 'SECOND', 'GUEST', 'PAGES', 'RESULT'] as const;
