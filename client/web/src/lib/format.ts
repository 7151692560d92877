/** Formats numbers and times for people. Pure. */

export function number(value: number | null | undefined, digits = 4): string {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return String(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(Math.max(0, digits - 2));
  return String(Number(value.toPrecision(digits)));
}

export function count(value: number | null | undefined): string {
  return value === null || value === undefined || Number.isNaN(value) ? "–" : value.toLocaleString("en-US");
}

/** Who paused training, without what tells two pauses of one token apart. */
export function holderText(holder: string): string {
  return holder.replace(/\/[0-9a-f]{8}$/, "");
}

/** Such as "1 step" and "2 steps". */
export function plural(value: number, one: string, many = `${one}s`): string {
  return `${count(value)} ${value === 1 ? one : many}`;
}

/** Such as "4.2 M", for columns that need no exact count. */
export function short(value: number): string {
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "–" : String(value);
  for (const [scale, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]] as const) {
    if (Math.abs(value) >= scale) {
      const divisor = unit === "k" ? 1e3 : scale;
      return `${Number((value / divisor).toPrecision(3))} ${unit}`;
    }
  }
  return count(value);
}

export function bytes(value: number): string {
  if (!Number.isFinite(value)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
  let at = 0;
  let left = value;
  while (Math.abs(left) >= 1024 && at < units.length - 1) {
    left /= 1024;
    at += 1;
  }
  return `${at === 0 ? left : left.toFixed(left < 10 ? 1 : 0)} ${units[at]}`;
}

/** A duration in seconds. */
export function duration(seconds: number): string {
  if (!Number.isFinite(seconds)) return "–";
  const size = Math.abs(seconds);
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (size < 1) return `${(seconds * 1e3).toFixed(size < 0.01 ? 1 : 0)} ms`;
  if (size < 60) return `${seconds.toFixed(size < 10 ? 1 : 0)} s`;
  if (size < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  if (size < 86_400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86_400)} d ${Math.floor((seconds % 86_400) / 3600)} h`;
}

export function clock(unixSeconds: number): string {
  const date = new Date(unixSeconds * 1000);
  if (Number.isNaN(date.getTime())) return "–";
  const today = new Date().toDateString() === date.toDateString();
  const time = date.toLocaleTimeString("en-GB");
  return today ? time : `${date.toLocaleDateString("en-CA")} ${time}`;
}

/** A label on a time axis that spans so many seconds: the day too once that is needed. */
export function clockTick(unixMs: number, spanS: number): string {
  const date = new Date(unixMs);
  const time = date.toLocaleTimeString("en-GB");
  return spanS <= 86_400 ? time : `${date.toLocaleDateString("en-CA").slice(5)} ${time.slice(0, 5)}`;
}

const SHORT_NAME = 20;
const TAIL = 14;

const MOST_TAIL = 40;

/**
 * A long name in two parts, of which the first may be cut: names differ at their ends, and by the
 * number of their layer, which is the beginning of the second part where there is one.
 */
export function halves(name: string): [string, string] {
  const units = [...name];
  if (units.length <= SHORT_NAME) return [name, ""];
  const layer = /^(.*\.)(\d+\..+)$/.exec(name);
  if (layer && layer[2]!.length <= MOST_TAIL) return [layer[1]!, layer[2]!];
  return [units.slice(0, -TAIL).join(""), units.slice(-TAIL).join("")];
}

/** Facts of any shape as words, without braces and quotes. */
export function words(value: unknown): string {
  if (Array.isArray(value)) return value.map(words).join(", ");
  if (typeof value === "object" && value !== null) {
    return Object.entries(value)
      .filter(([, one]) => one !== "" && one !== null && !(Array.isArray(one) && one.length === 0))
      .map(([key, one]) => `${key.replaceAll("_", " ")} ${typeof one === "object" ? `(${words(one)})` : words(one)}`)
      .join(", ");
  }
  return String(typeof value === "number" && !Number.isInteger(value) ? Number(value.toPrecision(6)) : value);
}

const SHORT_ID = 8;
const MOMENT = /^(.*_)?(seen|time|created|ended|began|begin|expires)_s$/;

/** What an event tells, with moments as clock times. */
export function eventText(data: Record<string, unknown>): string {
  const told = Object.entries(data).filter(([key, value]) => key !== "time_s" && key !== "job" && value !== -1);
  const shown = told.map(([key, value]): [string, unknown] => {
    if (MOMENT.test(key) && typeof value === "number") return [key.slice(0, -2), clock(value)];
    if (key === "incarnation") return ["run", value];
    return key === "id" && typeof value === "string" ? [key, value.slice(0, SHORT_ID)] : [key, value];
  });
  return words(Object.fromEntries(shown));
}

export function shape(dims: readonly number[]): string {
  return dims.length ? dims.join(" × ") : "scalar";
}

export function percent(part: number, whole: number): string {
  const share = (100 * part) / whole;
  if (!Number.isFinite(share)) return "–";
  if (share === 0) return "0 %";
  return share < 0.01 ? "< 0.01 %" : `${Number(share.toPrecision(3))} %`;
}

const SINGLE = new Set(["float32", "bfloat16", "float16"]);
const SINGLE_DIGITS = 9;

/**
 * An element's exact text in the fewest digits that no other float32 has; float64 in the fewest of
 * its own. Integers, booleans, complex and non-finite ones stay as they are.
 */
export function shortest(exact: string, dtype: string): string {
  const value = Number(exact);
  if (!dtype.includes("float") || exact.trim() === "" || !Number.isFinite(value)) return exact;
  if (!SINGLE.has(dtype)) return String(value);
  for (let digits = 1; digits < SINGLE_DIGITS; digits += 1) {
    const rounded = Number(value.toPrecision(digits));
    if (Math.fround(rounded) === Math.fround(value)) return String(rounded);
  }
  return String(Number(value.toPrecision(SINGLE_DIGITS)));
}
