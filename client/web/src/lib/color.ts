/** Colours of heat maps. Pure. */

export type Rgb = readonly [number, number, number];

const DIVERGING: readonly Rgb[] = [
  [33, 102, 172],
  [146, 197, 222],
  [247, 247, 247],
  [244, 165, 130],
  [178, 24, 43],
];
const DIVERGING_DARK: readonly Rgb[] = [
  [110, 175, 240],
  [45, 90, 140],
  [28, 32, 36],
  [140, 70, 40],
  [250, 150, 105],
];
const RISING: readonly Rgb[] = [
  [68, 1, 84],
  [59, 82, 139],
  [33, 145, 140],
  [94, 201, 98],
  [253, 231, 37],
];

/** Colour at a position in [0, 1] on a scale of evenly spaced colours. */
export function between(scale: readonly Rgb[], at: number): Rgb {
  const place = Math.min(1, Math.max(0, at)) * (scale.length - 1);
  const low = Math.min(Math.floor(place), scale.length - 2);
  const part = place - low;
  const [a, b] = [scale[low]!, scale[low + 1]!];
  return [0, 1, 2].map((i) => Math.round(a[i]! + (b[i]! - a[i]!) * part)) as unknown as Rgb;
}

/** Maps values to colours; for signed values 0 is the middle of the scale. */
export function colorer(
  low: number,
  high: number,
  options: { signed: boolean; dark: boolean },
): (value: number) => Rgb {
  if (options.signed) {
    const bound = Math.max(Math.abs(low), Math.abs(high)) || 1;
    const scale = options.dark ? DIVERGING_DARK : DIVERGING;
    return (value) => between(scale, (value / bound + 1) / 2);
  }
  const width = high - low || 1;
  return (value) => between(RISING, (value - low) / width);
}

/** An opaque mix of two "#rrggbb" or "#rgb" colours; `part` is the share of `ink`. */
export function tint(ground: string, ink: string, part: number): string {
  return `rgb(${between([rgbOf(ground), rgbOf(ink)], part).join(", ")})`;
}

function rgbOf(hex: string): Rgb {
  const digits = hex.length === 4 ? [...hex.slice(1)].map((digit) => digit + digit).join("") : hex.slice(1);
  return [0, 2, 4].map((at) => parseInt(digits.slice(at, at + 2), 16)) as unknown as Rgb;
}
