/** What charts draw: gaps, zoom, CSV. Pure. */

export type XY = [number, number | string];

/** A step between two points this many times the usual one is a gap. */
const GAP_FACTOR = 4;

/** The points with a break in each gap, so that no line bridges time in which nothing was seen. */
export function withGaps(points: readonly XY[]): XY[] {
  const steps = points.slice(1).map(([x], i) => x - points[i]![0]).filter((step) => step > 0);
  const usual = steps.sort((a, b) => a - b)[steps.length >> 1] ?? 0;
  const found: XY[] = [];
  for (const point of points) {
    const last = found.at(-1);
    if (last && usual > 0 && point[0] - last[0] > GAP_FACTOR * usual) found.push([last[0] + usual, "-"]);
    found.push(point);
  }
  return found;
}

/** Points asked of the history for each line of a chart. */
export const MAX_POINTS = 500;

/** The span in percent scaled around its middle by `factor` and moved by a part of itself. */
export function zoomed(span: readonly [number, number], factor: number, by: number): [number, number] {
  const width = Math.min(100, Math.max(0.5, (span[1] - span[0]) * factor));
  const middle = (span[0] + span[1]) / 2 + by * (span[1] - span[0]);
  const begin = Math.min(100 - width, Math.max(0, middle - width / 2));
  return [begin, begin + width];
}

export interface Named {
  name?: string;
  data?: readonly XY[];
}

/** One row a point: series, x, y. Text that a spreadsheet would run as a formula is quoted. */
export function csvOf(series: readonly Named[]): string {
  const rows = series.flatMap((one, i) =>
    (one.data ?? []).filter(([, y]) => y !== "-").map(([x, y]) => `${cell(one.name ?? `series ${i + 1}`)},${x},${y}`),
  );
  return ["series,x,y", ...rows, ""].join("\n");
}

function cell(text: string): string {
  const safe = /^[=+\-@\t]/.test(text) ? `'${text}` : text;
  return `"${safe.replaceAll('"', '""')}"`;
}
