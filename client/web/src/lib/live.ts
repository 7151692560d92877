/** Folds the event stream into one state. Pure. */

import type { ServerEvent } from "../api/sse";

export interface Live {
  /** Why the stream is down; null while connected. */
  problem: string | null;
  /** Unix time in seconds of the last event. */
  time_s: number;
  incarnation: number;
  step: number;
  /** Counters by kind; views fetch again when theirs rises. */
  changes: Readonly<Record<string, number>>;
  /** The last events, newest first. */
  recent: readonly { id: string; kind: string; time_s: number; data: Readonly<Record<string, unknown>> }[];
}

export const MAX_RECENT = 60;

export const NOTHING: Live = {
  problem: "connecting",
  time_s: 0,
  incarnation: -1,
  step: -1,
  changes: {},
  recent: [],
};

export function withEvent(live: Live, event: ServerEvent): Live {
  const data = parse(event.data);
  const time_s = asNumber(data["time_s"], live.time_s);
  const changes = { ...live.changes };
  const bump = (kind: string): void => {
    changes[kind] = (changes[kind] ?? 0) + 1;
  };
  if (event.kind === "gap" || event.kind === "hello") {
    // Events were missed: anything may have changed.
    for (const kind of ["rank", "incarnation", "alert", "snapshot", "edit", "mark", "pause", "export"]) bump(kind);
    return { ...live, time_s, changes };
  }
  bump(event.kind);
  const incarnation = asNumber(data["incarnation"], live.incarnation);
  // Steps rise within an incarnation; a new one starts over.
  const step = incarnation !== live.incarnation ? asNumber(data["step"], -1) : asNumber(data["step"], live.step);
  const next = { ...live, time_s, changes, incarnation, step };
  if (event.kind === "step") return next;
  const one = { id: event.id, kind: event.kind, time_s, data };
  return { ...next, recent: [one, ...live.recent].slice(0, MAX_RECENT) };
}

export function withProblem(live: Live, problem: string | null): Live {
  return live.problem === problem ? live : { ...live, problem };
}

function parse(text: string): Record<string, unknown> {
  try {
    const found: unknown = JSON.parse(text);
    return typeof found === "object" && found !== null ? (found as Record<string, unknown>) : {};
  } catch {
    return {};
  }
}

function asNumber(value: unknown, fallback: number): number {
  return typeof value === "number" && Number.isFinite(value) ? value : fallback;
}
