/**
 * Lets the VM run again, if nothing earlier did. In: the published capture. Out: the same. One resume
 * per pause; a VM that its owner had paused stays paused. Never fails: a VM that can't be resumed
 * is reported on the capture.
 */
import type { Freeze } from '../pipeline/freeze.ts';
import type { Stage } from '../pipeline/stage.ts';
import type { Published } from './publish.ts';

export interface ResumeDeps {
  readonly freeze: Freeze;
}

export function resumeVm(deps: ResumeDeps): Stage<Published, Published> {
  return {
    name: 'resume',
    async *run(input, { meter }) {
      for await (const published of input) {
        await meter.item(0, () => deps.freeze.end());
        meter.end();
        yield published;
      }
    },
  };
}
