/** Folds frames of gradient statistics into one row per tensor. Pure. */

import { badCount, type Stats } from "./stats";

/** Has no statistics when there was no gradient. */
export interface GradParam extends Partial<Stats> {
  name: string;
  /** Why the parameter had no gradient. */
  none: string | null;
  exponents?: [number, number][];
  /** Ranks with NaN or infinities; absent when none is known. */
  bad_ranks?: number[];
}

export interface Frame {
  incarnation: number;
  step: number;
  dropped: number;
  clip: { factor: number | null };
  scale: number;
  total: Stats;
  params: GradParam[];
}

export type Mark = "" | "none" | "vanishing" | "exploding" | "non-finite";

export interface GradRow {
  name: string;
  last: GradParam;
  /** Norms of the last frames, oldest first; null if non-finite or absent. */
  norms: (number | null)[];
  /** Step at which this page first saw NaN or an infinity; null: never. */
  firstBad: number | null;
  /** The ranks that had it then. */
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
  total: Stats | null;
  /** Step, norm, and when it came here in seconds since the Unix epoch. */
  totals: [number, number | null, number][];
  rows: ReadonlyMap<string, GradRow>;
}

export const KEPT_NORMS = 60;
export const KEPT_TOTALS = 600;
/** A gradient vanishes when the RMS of its elements is below this. */
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

export function withFrame(before: Grads, frame: Frame, time_s = Date.now() / 1000): Grads {
  const fresh = before.incarnation !== frame.incarnation;
  const rows = new Map(fresh ? [] : before.rows);
  for (const param of frame.params) rows.set(param.name, rowOf(rows.get(param.name), param, frame.step));
  const totals = fresh ? [] : before.totals;
  return {
    incarnation: frame.incarnation,
    step: frame.step,
    frames: (fresh ? 0 : before.frames) + 1,
    dropped: frame.dropped,
    clip: frame.clip.factor,
    scale: frame.scale,
    total: frame.total,
    totals: [...totals, [frame.step, frame.total.norm, time_s] as [number, number | null, number]].slice(-KEPT_TOTALS),
    rows,
  };
}

function rowOf(before: GradRow | undefined, param: GradParam, step: number): GradRow {
  const bad = badCount(param) > 0;
  const norms = before?.norms ?? [];
  const firstBad = before?.firstBad ?? (bad ? step : null);
  return {
    name: param.name,
    last: param,
    norms: [...norms, bad || param.none !== null ? null : (param.norm ?? null)].slice(-KEPT_NORMS),
    firstBad,
    firstBadRanks: before?.firstBad != null ? before.firstBadRanks : (param.bad_ranks ?? []),
    mark: markOf(param, norms),
  };
}

/** What is wrong with a gradient, compared with its previous norms. */
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
