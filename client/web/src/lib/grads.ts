/** Frames of gradient statistics, folded into what is shown of each tensor. Pure. */

export interface GradStats {
  count: number;
  norm: number | null;
  mean: number | null;
  std: number | null;
  min: number | null;
  max: number | null;
  zero_count: number;
  nan_count: number;
  inf_count: number;
}

/** Without numbers where there is no gradient. */
export interface GradParam extends Partial<GradStats> {
  fqn: string;
  /** Why the parameter had no gradient. */
  none: string | null;
  exponents?: [number, number][];
  /** Ranks that hold NaN or an infinity; absent when none is known to. */
  bad_ranks?: number[];
}

export interface Frame {
  incarnation: number;
  step: number;
  dropped: number;
  clip: { factor: number | null };
  scale: number;
  total: GradStats;
  params: GradParam[];
}

export type Mark = "" | "none" | "vanishing" | "exploding" | "non-finite";

export interface GradRow {
  fqn: string;
  last: GradParam;
  /** Norms of the last frames, oldest first; null where not finite or absent. */
  norms: (number | null)[];
  /** Step at which NaN or an infinity was first seen by this page; null: never. */
  firstBad: number | null;
  /** The ranks that held it then. */
  firstBadRanks: readonly number[];
  mark: Mark;
}

export interface Grads {
  incarnation: number;
  step: number;
  frames: number;
  dropped: number;
  clip: number | null;
  scale: number;
  total: GradStats | null;
  totals: [number, number | null][];
  rows: ReadonlyMap<string, GradRow>;
}

export const KEPT_NORMS = 60;
export const KEPT_TOTALS = 600;
/** RMS of the elements below which a gradient is called vanishing. */
export const VANISHING_RMS = 1e-9;
export const EXPLODING_FACTOR = 10;
const ENOUGH = 5;

export const NO_GRADS: Grads = {
  incarnation: -1,
  step: -1,
  frames: 0,
  dropped: 0,
  clip: null,
  scale: 1,
  total: null,
  totals: [],
  rows: new Map(),
};

export function withFrame(before: Grads, frame: Frame): Grads {
  const fresh = before.incarnation !== frame.incarnation;
  const rows = new Map(fresh ? [] : before.rows);
  for (const param of frame.params) rows.set(param.fqn, rowOf(rows.get(param.fqn), param, frame.step));
  const totals = fresh ? [] : before.totals;
  return {
    incarnation: frame.incarnation,
    step: frame.step,
    frames: (fresh ? 0 : before.frames) + 1,
    dropped: frame.dropped,
    clip: frame.clip.factor,
    scale: frame.scale,
    total: frame.total,
    totals: [...totals, [frame.step, frame.total.norm] as [number, number | null]].slice(-KEPT_TOTALS),
    rows,
  };
}

function rowOf(before: GradRow | undefined, param: GradParam, step: number): GradRow {
  const bad = badCount(param) > 0;
  const norms = before?.norms ?? [];
  const firstBad = before?.firstBad ?? (bad ? step : null);
  return {
    fqn: param.fqn,
    last: param,
    norms: [...norms, bad || param.none !== null ? null : (param.norm ?? null)].slice(-KEPT_NORMS),
    firstBad,
    firstBadRanks: before?.firstBad != null ? before.firstBadRanks : (param.bad_ranks ?? []),
    mark: markOf(param, norms),
  };
}

export function badCount(param: Partial<GradStats>): number {
  return (param.nan_count ?? 0) + (param.inf_count ?? 0);
}

/** What is wrong with a gradient, beside those before it. */
export function markOf(param: GradParam, norms: readonly (number | null)[]): Mark {
  if (param.none !== null) return "none";
  if (badCount(param) > 0) return "non-finite";
  const norm = param.norm ?? 0;
  if (norm / Math.sqrt(Math.max(1, param.count ?? 0)) < VANISHING_RMS) return "vanishing";
  const known = norms.filter((one): one is number => one !== null).sort((a, b) => a - b);
  const middle = known[known.length >> 1];
  if (known.length >= ENOUGH && middle !== undefined && norm > EXPLODING_FACTOR * middle) {
    return "exploding";
  }
  return "";
}
