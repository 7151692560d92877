/** Runs that are compared: an incarnation of a job, as "job@3" in the address. Pure. */

export interface Run {
  job: string;
  incarnation: number;
}

export function parseRun(text: string): Run | null {
  const at = text.lastIndexOf("@");
  const incarnation = Number(text.slice(at + 1));
  return at > 0 && Number.isInteger(incarnation) && incarnation > 0 ? { job: text.slice(0, at), incarnation } : null;
}

export function runText(run: Run): string {
  return `${run.job} ${run.incarnation}`;
}

interface Points {
  points: readonly { step: number; mean: number | null; count: number }[];
}

/** The mean of all finite samples; null when there is none. */
export function meanOf(series: Points): number | null {
  const total = series.points.reduce((sum, point) => sum + point.count, 0);
  if (total === 0) return null;
  return series.points.reduce((sum, point) => sum + (point.mean ?? 0) * point.count, 0) / total;
}
