/** One word for how a job does, and why. Green only when everything was looked at and is well. Pure. */

import type { JobSummary } from "../api/schema";
import { count, duration } from "./format";

export interface Health {
  tone: "ok" | "warn" | "bad" | "mute" | "info";
  word: string;
  /** One sentence; empty when all is well. */
  why: string;
}

/** A check of the parameters' values for NaN and infinities. */
export interface Values {
  /** Tensors with NaN or infinities; null: not known. */
  bad: number | null;
  /** The first of them in model order. */
  first: string;
  /** Why it is not known. */
  why: string;
}

export const UNCHECKED: Values = { bad: null, first: "", why: "not checked yet" };

/** A job list older than this is stale: it is asked for every 5 s and given up after 5 s. */
export const STALE_MS = 15_000;

export interface Known {
  summary: JobSummary | null;
  values: Values;
  /** Time since the control plane last answered; null: it never has. */
  silentMs: number | null;
  /** Why the last request failed; null: it did not. */
  problem: string | null;
}

export function healthOf(known: Known): Health {
  const { summary, values, silentMs, problem } = known;
  if (silentMs === null && problem === null) return { tone: "mute", word: "loading", why: "" };
  if (silentMs === null || silentMs > STALE_MS || problem !== null) {
    const heard = silentMs === null ? "" : `; what is shown is ${duration(Math.round(silentMs / 1000))} old`;
    return { tone: "bad", word: "unknown", why: `${problem ?? "the control plane does not answer"}${heard}` };
  }
  if (!summary) return { tone: "mute", word: "unknown job", why: "this control plane does not serve it" };
  return ofSummary(summary, values);
}

function ofSummary(summary: JobSummary, values: Values): Health {
  const { state, reason, critical_count: critical, warning_count: warnings, hold } = summary;
  if (state === "ended") return { tone: "mute", word: "ended", why: reason };
  if (state === "down") return { tone: "bad", word: "down", why: reason };
  if (values.bad) {
    const more = values.bad > 1 ? ` and ${count(values.bad - 1)} more` : "";
    return { tone: "bad", word: "not finite", why: `NaN or infinities in ${values.first}${more}` };
  }
  if (critical > 0) return { tone: "bad", word: "critical", why: `${alerts(critical)} of severity critical` };
  if (state === "degraded") return { tone: "warn", word: "degraded", why: reason };
  if (warnings > 0) return { tone: "warn", word: "warning", why: alerts(warnings) };
  if (hold !== "running") return { tone: "warn", word: hold, why: "training is held; Edits says by whom" };
  if (state === "starting") return { tone: "info", word: "starting", why: reason };
  if (values.bad === null) {
    return { tone: "info", word: "running", why: `whether values are finite is not known: ${values.why}` };
  }
  return { tone: "ok", word: "ok", why: "" };
}

function alerts(n: number): string {
  return `${count(n)} alert${n === 1 ? "" : "s"} firing`;
}
