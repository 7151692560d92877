/** Mesh axes, inferred from placements; coordinates of ranks; stragglers. Pure. */

import type { Alert } from "../api/schema";

export interface Axis {
  name: "data" | "shard" | "tensor" | "rank";
  size: number;
}

interface Placed {
  placement: string;
}

/**
 * The mesh axes implied by parameters' placements, outermost first; their product is the
 * world size. An axis that replicates everything is data; one that splits parameters along
 * different dims, or splits only some, is tensor; any other that shards is shard.
 */
export function axesOf(params: readonly Placed[], worldSize: number): Axis[] {
  const plain: Axis[] = [{ name: "rank", size: worldSize }];
  const whole: string[][] = [];
  for (const { placement } of params) {
    const parts = placement.split(/,\s+(?=[A-Za-z_])/);
    const sizes = parts.map(sizeOf);
    if (sizes.every((size) => size > 0) && product(sizes) === worldSize) whole.push(parts);
  }
  const longest = Math.max(0, ...whole.map((parts) => parts.length));
  const chosen = whole.filter((parts) => parts.length === longest);
  const first = chosen[0];
  if (!first) {
    const allReplicated = params.length > 0 && params.every((p) => p.placement === "replicated");
    return allReplicated ? [{ name: "data", size: worldSize }] : plain;
  }
  return first.map((part, at) => {
    const kinds = new Set(chosen.map((parts) => kindOf(parts[at] ?? "")));
    return { name: axisName(kinds, at, longest), size: sizeOf(part) };
  });
}

function axisName(kinds: ReadonlySet<string>, at: number, axes: number): Axis["name"] {
  if (kinds.size === 1 && kinds.has("Replicate")) return "data";
  if (kinds.size > 1 && at === axes - 1 && axes > 1) return "tensor";
  return "shard";
}

function kindOf(part: string): string {
  return part.replace(/^_/, "").replace(/\s+over\s+\d+$/, "").replace("Strided", "");
}

function sizeOf(part: string): number {
  const found = / over (\d+)$/.exec(part);
  return found ? Number(found[1]) : 0;
}

function product(sizes: readonly number[]): number {
  return sizes.reduce((total, size) => total * size, 1);
}

/** Coordinates of a rank on each axis, row-major as in torch's DeviceMesh. */
export function coordinates(rank: number, axes: readonly Axis[]): number[] {
  const found: number[] = [];
  let left = rank;
  for (const axis of [...axes].reverse()) {
    found.unshift(left % axis.size);
    left = Math.floor(left / axis.size);
  }
  return found;
}

/** Rules that find a rank slower than the others. */
const SLOW_RULES: ReadonlySet<string> = new Set(["slow-rank", "straggler"]);

/**
 * Ranks that the control plane calls slower than the others: the page has no rule of its own, and names none that the
 * verdict does not. An alert of several ranks is about the data that all of them wait for.
 */
export function stragglers(alerts: readonly Pick<Alert, "rule" | "state" | "ranks">[], named: ReadonlySet<number>): Set<number> {
  const slow = alerts.filter((alert) => alert.state === "firing" && SLOW_RULES.has(alert.rule) && alert.ranks.length === 1);
  return new Set(slow.flatMap((alert) => alert.ranks).filter((rank) => named.has(rank)));
}

export function median(values: readonly number[]): number {
  if (values.length === 0) return Number.NaN;
  const sorted = [...values].sort((a, b) => a - b);
  const half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half]! : (sorted[half - 1]! + sorted[half]!) / 2;
}

export function countBy<T>(items: readonly T[], key: (item: T) => string): Map<string, number> {
  const found = new Map<string, number>();
  for (const item of items) found.set(key(item), (found.get(key(item)) ?? 0) + 1);
  return found;
}
