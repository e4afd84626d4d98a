/** What the demo prints: what each capture cost, where its time went, and where the files are. */
import type { CaptureView } from '../capture/types.ts';
import { stageNames } from '../stage-names.ts';
import { countText, msText, sizeText, table } from './table.ts';

export interface DemoStep {
  readonly name: string;
  readonly capture: CaptureView;
}

export interface DemoOutcome {
  readonly backend: string;
  readonly backendReason: string;
  /** Who runs it: `the small VM`, or a Firecracker with its version. */
  readonly vmm: string;
  readonly dialect: string;
  readonly trackingMode: string;
  readonly memoryMib: number;
  readonly pages: number;
  readonly differing: number;
  readonly runsOn: boolean;
  readonly restoreMs: number;
  readonly totalMs: number;
  readonly steps: readonly DemoStep[];
  readonly files: Readonly<Record<string, string>>;
}

function captureTable(steps: readonly DemoStep[]): string {
  const head = ['CAPTURE', 'FROZEN', 'TOTAL', 'SELECTED', 'AS PARENT', 'ZERO', 'LAYER', 'CHAIN'];
  const rows = steps.map(({ name, capture: { result } }) =>
    result === null
      ? [name]
      : [
          name,
          result.frozenMs === 0 ? '-' : msText(result.frozenMs),
          msText(result.totalMs),
          countText(result.selectedPages),
          countText(result.deduplicatedPages),
          countText(result.zeroPages),
          sizeText(result.layerBytes),
          String(result.chainDepth),
        ],
  );
  return table(head, rows);
}

/** Time per stage from its first to its last item; stages overlap, so rows do not add up. */
function stageTable(steps: readonly DemoStep[]): string {
  const head = ['STAGE', ...steps.map(({ name }) => name.split(' (')[0]?.toUpperCase() ?? name)];
  const rows = stageNames.map((stage) => [
    stage,
    ...steps.map(({ capture }) => {
      const report = capture.stages.find((candidate) => candidate.stage === stage);
      return report === undefined ? '-' : msText(report.endedMs - report.startedMs);
    }),
  ]);
  return table(head, rows);
}

export function demoReport(outcome: DemoOutcome): string {
  const guest = outcome.backend === 'kvm' ? 'a KVM guest' : 'a thread';
  const why = outcome.backend === 'kvm' ? '' : ` (${outcome.backendReason})`;
  const verdict =
    outcome.differing === 0
      ? `all ${countText(outcome.pages)} pages are equal`
      : `${countText(outcome.differing)} of ${countText(outcome.pages)} pages DIFFER`;
  const onward = outcome.runsOn ? 'the restored guest runs on' : 'the restored guest does NOT run';
  const names = Math.max(...Object.keys(outcome.files).map((name) => name.length));
  return [
    `Guest: ${outcome.memoryMib} MiB, ${guest}${why} of ${outcome.vmm}; dialect ${outcome.dialect}, ` +
      `tracking mode ${outcome.trackingMode}.`,
    'It kept writing during the base and epochs 1 to 3; its owner paused it for the last capture,',
    'so that every page could be compared with a second VM restored from it.',
    '',
    captureTable(outcome.steps),
    '',
    'Time per stage (stages overlap):',
    stageTable(outcome.steps),
    '',
    `Restored in ${msText(outcome.restoreMs)}: ${verdict}; ${onward}.`,
    '',
    'Files:',
    ...Object.entries(outcome.files).map(([name, path]) => `  ${name.padEnd(names)}  ${path}`),
    '',
    `Done in ${msText(outcome.totalMs)}.`,
  ].join('\n');
}
