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
    // After a rollback steps come again: another line.
    if (last && point[0] < last[0]) found.push([last[0], "-"]);
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

/** What is drawn is told as one row a point. Text that a spreadsheet would run as a formula is quoted. */
export function csvOf(job: string, series: readonly Named[], x = "x", y = "y"): string {
  const rows = series.flatMap((one, i) =>
    (one.data ?? []).filter((point) => point[1] !== "-").map((point) => `${cell(job)},${cell(one.name ?? `series ${i + 1}`)},${point[0]},${point[1]}`),
  );
  return [`job,series,${cell(x)},${cell(y)}`, ...rows, ""].join("\n");
}

/** One row a point, with its step and its time as people and programs read it. */
export function linesCsv(job: string, lines: readonly Line[]): string {
  const rows = lines.flatMap((line) =>
    line.points.map((point) => {
      const time = Number.isFinite(point.time_s) ? new Date(1000 * point.time_s).toISOString() : "";
      return [cell(job), cell(line.name), point.step >= 0 ? point.step : "", time, point.value ?? ""].join(",");
    }),
  );
  return ["job,series,step,time,value", ...rows, ""].join("\n");
}

function cell(text: string): string {
  const safe = /^[=+\-@\t]/.test(text) ? `'${text}` : text;
  return `"${safe.replaceAll('"', '""')}"`;
}

export interface Point {
  /** -1: not known. */
  step: number;
  time_s: number;
  /** null: not finite. */
  value: number | null;
  /** Samples that it is the mean of. */
  count?: number;
}

export interface Line {
  name: string;
  points: readonly Point[];
}

export type By = "step" | "time";

export interface Mode {
  by: By;
  log: boolean;
  /** Weight of the past when smoothing, from 0 (none) to below 1. */
  weight: number;
}

/** Where a point lies along the axis; null where it has no such place. */
export function placeOf(point: Point, by: By): number | null {
  if (by === "time") return 1000 * point.time_s;
  return point.step >= 0 ? point.step : null;
}

/** A line as it is drawn; its numbers already smoothed if they are to be. A log scale cannot show zero. */
export function drawn(points: readonly Point[], values: readonly (number | null)[], mode: Mode): XY[] {
  const found = points.flatMap((point, i): XY[] => {
    const x = placeOf(point, mode.by);
    const value = values[i] ?? null;
    if (x === null) return [];
    return [[x, value === null || (mode.log && value <= 0) ? "-" : Number(value.toPrecision(7))]];
  });
  return withGaps(found);
}

/** Points without a neighbour to draw a line to. */
export function loneOf(points: readonly XY[]): Set<number> {
  const there = (i: number): boolean => i >= 0 && i < points.length && points[i]![1] !== "-";
  return new Set(points.flatMap((_, i) => (there(i) && !there(i - 1) && !there(i + 1) ? i : [])));
}

const CLOSE = 1e-5;
/** Means of spans that lost a sample on one of the ranks differ a little: few may, by no more than this. */
const NEAR = 0.05;
const MOST_CLOSE = 0.95;

/** Lines of ranks that log the same number are one line; what cannot be compared stays apart. */
export function agreed(lines: readonly Line[]): readonly Line[] {
  const [first, ...others] = lines;
  if (!first || others.length === 0) return lines;
  const of = new Map(first.points.map((point) => [point.step, point]));
  const same = others.every((line) => {
    const both = line.points.flatMap((point) => {
      const other = of.get(point.step);
      return other && point.step >= 0 && other.count === point.count ? [[point.value, other.value] as const] : [];
    });
    const within = (share: number) => ([a, b]: readonly [number | null, number | null]): boolean =>
      a === null || b === null ? a === b : Math.abs(a - b) <= share * Math.max(Math.abs(a), Math.abs(b));
    const close = both.filter(within(CLOSE)).length >= MOST_CLOSE * both.length && both.every(within(NEAR));
    return close && 2 * both.length > Math.min(line.points.length, first.points.length);
  });
  const longest = lines.reduce((a, b) => (b.points.length > a.points.length ? b : a), first);
  return same ? [{ name: `all ${lines.length} ranks`, points: longest.points }] : lines;
}

/** The place of a moment along steps: that of the last point before it; null before the first. */
export function stepAt(points: readonly Point[], time_s: number): number | null {
  const before = points.filter((point) => point.time_s <= time_s && point.step >= 0);
  return before.at(-1)?.step ?? null;
}
