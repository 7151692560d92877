/** The statistics that all views show of a tensor or a gradient. A new one is one entry. Pure. */

import type { StatsDocument } from "../api/schema";
import { count, number, percent } from "./format";

export type Stats = Omit<StatsDocument, "name" | "dtype" | "shape" | "exponents">;

export interface Statistic {
  key: keyof Stats;
  title: string;
  /** Of its column in tables; without a width it has none. */
  width?: string;
  /** Its column is hidden in narrow tables. */
  wide?: boolean;
  /** A number of elements, shown and sorted as their share. */
  share?: boolean;
}

/** Non-finite elements are not among them: views show and mark those themselves. */
export const STATISTICS: readonly Statistic[] = [
  { key: "norm", title: "norm", width: "5.4rem" },
  { key: "mean", title: "mean", width: "6.5rem", wide: true },
  { key: "std", title: "std", width: "6rem", wide: true },
  { key: "min", title: "min" },
  { key: "max", title: "max" },
  { key: "zero_count", title: "zeros", width: "5rem", wide: true, share: true },
];

export const COLUMNS = STATISTICS.filter((one) => one.width !== undefined);

/** What to sort by; null when there is no finite element. */
export function valueOf(one: Statistic, stats: Partial<Stats>): number | null {
  const value = stats[one.key] ?? null;
  return one.share && value !== null ? value / Math.max(1, stats.count ?? 0) : value;
}

export function text(one: Statistic, stats: Partial<Stats>, digits = 4): string {
  return one.share ? percent(stats[one.key] ?? 0, stats.count ?? 0) : number(stats[one.key], digits);
}

/** Title and text of each, for a list of facts, which says what its numbers leave out. */
export function facts(stats: Partial<Stats>): [string, string][] {
  const bad = badCount(stats);
  const told = STATISTICS.map((one): [string, string] => [one.title, text(one, stats, 6)]);
  return bad > 0 ? [...told, ["left out above", `${count(bad)} NaN or Inf of ${count(stats.count)}`]] : told;
}

export function badCount(stats: Partial<Stats>): number {
  return (stats.nan_count ?? 0) + (stats.inf_count ?? 0);
}

export function badText(stats: Stats): string {
  return `${count(stats.nan_count)}, ${count(stats.inf_count)}`;
}
