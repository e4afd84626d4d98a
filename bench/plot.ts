/** Draws what part `chain` of the epochs bench measured, as an SVG that needs nothing else. */
import { writeFileSync } from 'node:fs';

export interface EpochPoint {
  readonly epoch: number;
  /** Layers of the chain once this epoch is committed. */
  readonly depth: number;
  /** Guest bytes stored by captures so far, and written again by compaction. */
  readonly capturedBytes: number;
  readonly rewrittenBytes: number;
}

const width = 720;
const left = 64;
const right = 16;
const panelHeight = 180;
const tops = [36, 276] as const;

/** More points than this say nothing at this width. */
const pointsMax = 360;

export function plotEpochs(file: string, points: readonly EpochPoint[], maxChain: number): void {
  writeFileSync(file, epochsSvg(points, maxChain));
}

export function epochsSvg(points: readonly EpochPoint[], maxChain: number): string {
  const last = points.at(-1);
  if (last === undefined) throw new Error('there is nothing to plot');
  const step = Math.max(1, Math.ceil(points.length / pointsMax));
  const shown = points.filter((point, index) => index % step === 0 || point === last);
  const mib = (bytes: number): number => bytes / 1024 / 1024;
  const bytesMax = mib(last.capturedBytes) * 4;
  const bytes = panel(tops[0], last.epoch, bytesMax, 'MiB', 'Guest bytes');
  const depth = panel(tops[1], last.epoch, maxChain, '', 'Layers in the chain');
  const of = (read: (point: EpochPoint) => number): [number, number][] =>
    shown.map((point) => [point.epoch, read(point)]);
  const body = [
    bytes.frame,
    bytes.curve(
      '#888',
      'budget: 4 × captured',
      of((p) => mib(p.capturedBytes) * 4),
      0,
      '4 3',
    ),
    bytes.curve(
      '#0b6',
      'captured',
      of((p) => mib(p.capturedBytes)),
      1,
    ),
    bytes.curve(
      '#c40',
      'rewritten by compaction',
      of((p) => mib(p.rewrittenBytes)),
      2,
    ),
    depth.frame,
    depth.curve(
      '#888',
      `max_chain = ${maxChain}`,
      of(() => maxChain),
      0,
      '4 3',
    ),
    depth.curve(
      '#05c',
      'depth after each capture',
      of((p) => p.depth),
      1,
    ),
  ];
  const height = tops[1] + panelHeight + 44;
  return (
    `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${height}" ` +
    'font-family="sans-serif" font-size="12">\n' +
    `<rect width="${width}" height="${height}" fill="#fff"/>\n${body.join('\n')}\n</svg>\n`
  );
}

interface Panel {
  readonly frame: string;
  curve(
    colour: string,
    name: string,
    points: readonly (readonly [number, number])[],
    place: number,
    dashes?: string,
  ): string;
}

function panel(top: number, xMax: number, yMax: number, unit: string, title: string): Panel {
  const bottom = top + panelHeight;
  const x = (value: number): number => left + (value / xMax) * (width - left - right);
  const y = (value: number): number => bottom - (value / yMax) * panelHeight;
  const labels = [0, 0.25, 0.5, 0.75, 1].flatMap((share) => {
    const [across, up] = [x(share * xMax).toFixed(1), y(share * yMax).toFixed(1)];
    return [
      `<text x="${left - 8}" y="${up}" text-anchor="end">${Math.round(share * yMax)}</text>`,
      `<text x="${across}" y="${bottom + 16}" text-anchor="middle">${Math.round(share * xMax)}</text>`,
      `<line x1="${left}" x2="${width - right}" y1="${up}" y2="${up}" stroke="#eee"/>`,
    ];
  });
  const heading = unit === '' ? title : `${title}, ${unit}`;
  const frame = [
    `<text x="${left}" y="${top - 12}" font-weight="bold">${heading}</text>`,
    `<text x="${width - right}" y="${bottom + 32}" text-anchor="end">captures</text>`,
    ...labels,
  ].join('\n');
  return {
    frame,
    curve(colour, name, points, place, dashes = 'none') {
      const path = points.map(([at, value]) => `${x(at).toFixed(1)},${y(value).toFixed(1)}`);
      // On the heading's line, where no curve runs.
      const entry = left + 230 + place * 135;
      return (
        `<polyline points="${path.join(' ')}" fill="none" stroke="${colour}" ` +
        `stroke-width="1.5" stroke-dasharray="${dashes}"/>` +
        `<text x="${entry}" y="${top - 12}" fill="${colour}">${name}</text>`
      );
    },
  };
}
