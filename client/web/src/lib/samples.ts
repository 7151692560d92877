/** Samples of a tensor that the page collected, to show how it changes over steps. Pure. */

import type { Stats } from "./stats";

export interface Histogram {
  incarnation: number;
  step: number;
  edges: number[];
  counts: number[];
  below_count: number;
  above_count: number;
}


export interface Heat {
  cell_row_count: number;
  cell_col_count: number;
  values: (number | null)[];
}

/** A tensor at one step. */
export interface Sample {
  incarnation: number;
  step: number;
  /** Unix time in seconds when the response arrived. */
  time_s: number;
  stats: Stats;
  /** null: no element was finite. */
  histogram: Histogram | null;
  heat: Heat | null;
}

export const MAX_SAMPLES = 240;

/** Add a sample: it replaces one of the same step, and the oldest are dropped. */
export function withSample(samples: readonly Sample[], sample: Sample): Sample[] {
  const kept = samples.filter((one) => one.incarnation === sample.incarnation && one.step !== sample.step);
  kept.push(sample);
  kept.sort((a, b) => a.step - b.step);
  return kept.slice(-MAX_SAMPLES);
}

/** At most `wanted` items, evenly spaced, including the first and the last. */
export function spread<T>(items: readonly T[], wanted: number): T[] {
  if (items.length <= wanted) return [...items];
  if (wanted === 1) return [items[items.length - 1]!];
  return Array.from(
    { length: wanted },
    (_, i) => items[Math.round((i * (items.length - 1)) / (wanted - 1))]!,
  );
}

/** Debiased exponential smoothing, as in TensorBoard; weight 0 changes nothing. */
export function smooth(values: readonly (number | null)[], weight: number): (number | null)[] {
  let last = 0;
  let debias = 0;
  return values.map((value) => {
    if (value === null) return null;
    last = last * weight + (1 - weight) * value;
    debias = debias * weight + (1 - weight);
    return last / debias;
  });
}

/** A histogram as a density, comparable with one that has other edges. */
export function density(histogram: Histogram): [number, number][] {
  const total =
    histogram.counts.reduce((sum, n) => sum + n, 0) + histogram.below_count + histogram.above_count;
  return histogram.counts.map((n, i) => {
    const low = histogram.edges[i]!;
    const high = histogram.edges[i + 1]!;
    const width = high - low;
    return [(low + high) / 2, total && width ? n / total / width : 0];
  });
}

/** b - a of two heat maps of the same size, cell by cell; null where either has no value. */
export function difference(a: Heat, b: Heat): Heat | null {
  if (a.cell_row_count !== b.cell_row_count || a.cell_col_count !== b.cell_col_count) return null;
  const values = b.values.map((value, i) => {
    const before = a.values[i] ?? null;
    return value === null || before === null ? null : value - before;
  });
  return { cell_row_count: b.cell_row_count, cell_col_count: b.cell_col_count, values };
}
