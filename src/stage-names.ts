/** The eight stages of a capture, in the default order. */
export const stageNames = [
  'pause',
  'dirty-bitmap',
  'coalesce',
  'read',
  'compact',
  'commit',
  'publish',
  'resume',
] as const;
export type StageName = (typeof stageNames)[number];
