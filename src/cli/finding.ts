/** What `varve doctor` finds. */
export interface Finding {
  /** What was checked; stable, for programs. */
  readonly check: string;
  readonly level: 'ok' | 'warn' | 'fail';
  /** What is there. */
  readonly found: string;
  /** What to do about it; absent where nothing need be done. */
  readonly advice?: string;
}

export const fine = (check: string, found: string): Finding => ({ check, level: 'ok', found });
export const warn = (check: string, found: string, advice: string): Finding => ({
  check,
  level: 'warn',
  found,
  advice,
});
export const fail = (check: string, found: string, advice: string): Finding => ({
  check,
  level: 'fail',
  found,
  advice,
});
