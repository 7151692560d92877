/** Ticks at round numbers. Pure. */

export interface Tick {
  /** Place along the axis, from 0 to 1. */
  at: number;
  label: string;
}

/** Round steps of 1, 2 or 5 times a power of ten, at least `least`. */
export function roundStep(least: number): number {
  if (!(least > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(least));
  const found = [1, 2, 5, 10].find((factor) => factor * power >= least * (1 - 1e-9));
  return (found ?? 10) * power;
}

/** Ticks at the middle of elements [begin, begin + n) whose index is round; at most `most` or so. */
export function indexTicks(n: number, begin: number, most = 6): Tick[] {
  if (n <= 0) return [];
  const step = Math.max(1, roundStep(n / most));
  const found: Tick[] = [];
  for (let index = Math.ceil(begin / step) * step; index < begin + n; index += step) {
    found.push({ at: (index - begin + 0.5) / n, label: index.toLocaleString("en-US") });
  }
  return found;
}

/** Evenly spaced values from low to high, both included. */
export function valueTicks(low: number, high: number, n: number, text: (value: number) => string): Tick[] {
  if (high <= low) return [{ at: 0.5, label: text(low) }];
  return Array.from({ length: n }, (_, i) => ({ at: i / (n - 1), label: text(low + ((high - low) * i) / (n - 1)) }));
}
