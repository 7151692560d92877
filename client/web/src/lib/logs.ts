/** The lines of a rank's logs, as people read them. Pure. */

import { clock } from "./format";

/** The traceback that a log ends with, and the rank that wrote it. */
export interface Traceback {
  /** -1: the log does not say whose it is. */
  rank: number;
  lines: readonly string[];
}

const BEGIN = "Traceback (most recent call last):";
/** torch puts this before each line of a traceback in a distributed program. */
const OF_RANK = /^\[rank(\d+)\]: ?/;
/** A traceback that another one caused goes on after these. */
const CHAINED = /^(The above exception was the direct cause|During handling of the above exception)/;

/** The last traceback of `rank` in a log, whole; of another rank, when this one left none; null: there is none. */
export function tracebackOf(lines: readonly string[], rank: number): Traceback | null {
  const ranks = [...new Set(lines.map(rankOf))];
  const found = ranks.map((each) => ({ rank: each, lines: lastOf(lines.filter((line) => rankOf(line) === each).map((line) => line.replace(OF_RANK, ""))) }));
  const whole = found.filter((each) => each.lines.length > 0);
  return whole.find((each) => each.rank === rank) ?? whole.find((each) => each.rank === -1) ?? whole[0] ?? null;
}

function rankOf(line: string): number {
  const found = OF_RANK.exec(line);
  return found ? Number(found[1]) : -1;
}

/** The last traceback among lines of one rank, with those that led to it. */
function lastOf(lines: readonly string[]): string[] {
  let begin = lines.findLastIndex((line) => line.trim() === BEGIN);
  if (begin < 0) return [];
  const end = endOf(lines, begin);
  for (let earlier = before(lines, begin); earlier >= 0; earlier = before(lines, begin)) begin = earlier;
  return lines.slice(begin, end);
}

/** The first line after the message of the traceback that begins at `begin`. */
function endOf(lines: readonly string[], begin: number): number {
  let at = begin + 1;
  while (at < lines.length && (lines[at]!.startsWith(" ") || lines[at] === "")) at += 1;
  // The message: what is raised, and the lines that belong to it.
  at += 1;
  while (at < lines.length && lines[at]!.startsWith(" ")) at += 1;
  return Math.min(at, lines.length);
}

/** Where the traceback begins that caused the one at `begin`; -1: it has no cause. */
function before(lines: readonly string[], begin: number): number {
  let at = begin - 1;
  while (at >= 0 && lines[at] === "") at -= 1;
  if (at < 0 || !CHAINED.test(lines[at]!)) return -1;
  return lines.slice(0, at).findLastIndex((line) => line.trim() === BEGIN);
}

/** A line for people: a JSON record of a sidecar becomes its time, its event, and the rest. */
export function lineText(line: string): string {
  const record = recordOf(line);
  if (record === null) return line;
  const { time, event, level: _level, ...rest } = record;
  const told = Object.entries(rest).filter(([, value]) => value !== null && value !== "");
  const more = told.map(([key, value]) => (key === "message" ? String(value) : `${key}=${typeof value === "object" ? JSON.stringify(value) : String(value)}`));
  return [typeof time === "number" ? clock(time) : "", String(event ?? ""), ...more].filter(Boolean).join(" ");
}

function recordOf(line: string): Record<string, unknown> | null {
  if (!line.startsWith("{")) return null;
  try {
    const found: unknown = JSON.parse(line);
    return typeof found === "object" && found !== null && "time" in found ? (found as Record<string, unknown>) : null;
  } catch {
    return null;
  }
}
