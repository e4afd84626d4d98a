/** Plain text for people: aligned tables, sizes, times. */

/** Columns aligned to the widest cell; cells that look like numbers to the right. */
export function table(head: readonly string[], rows: readonly (readonly string[])[]): string {
  const all = [head, ...rows];
  const widths = head.map((_, column) => Math.max(...all.map((row) => row[column]?.length ?? 0)));
  const isNumber = head.map((_, column) =>
    rows.every((row) => /^(-|[\d.,]+( ?[A-Za-z%×]+)?)?$/.test(row[column] ?? '')),
  );
  const line = (row: readonly string[]): string =>
    row
      .map((cell, column) => {
        const width = widths[column] ?? 0;
        return isNumber[column] === true ? cell.padStart(width) : cell.padEnd(width);
      })
      .join('  ')
      .trimEnd();
  return all.map(line).join('\n');
}

const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'] as const;

/** A size with three digits or so: `4.0 MiB`. */
export function sizeText(bytes: number): string {
  let value = bytes;
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit++;
  }
  return `${unit === 0 ? value : value.toFixed(1)} ${units[unit] ?? ''}`;
}

/** A duration: `12.3 ms`, `4.56 s`. */
export const msText = (ms: number): string =>
  ms < 1000 ? `${ms.toFixed(1)} ms` : `${(ms / 1000).toFixed(2)} s`;

/** A point in time, to the second, in UTC. */
export const timeText = (ms: number): string =>
  new Date(ms).toISOString().replace('T', ' ').slice(0, 19);

export const countText = (count: number): string => count.toLocaleString('en-US');
