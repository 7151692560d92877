/** One word for how a job does, and why. Green only when everything was looked at and is well. Pure. */

import type { JobSummary } from "../api/schema";
import { duration } from "./format";

export interface Health {
  tone: "ok" | "warn" | "bad" | "mute" | "info";
  word: string;
  /** One sentence; empty when all is well. */
  why: string;
}

/** A job list older than this is stale: it is asked for every 5 s and given up after 5 s. */
export const STALE_MS = 15_000;

export interface Known {
  summary: JobSummary | null;
  /** Time since the control plane last answered; null: it never has. */
  silentMs: number | null;
  /** Why the last request failed; null: it did not. */
  problem: string | null;
}

export function healthOf(known: Known): Health {
  const { summary, silentMs, problem } = known;
  if (silentMs === null && problem === null) return { tone: "mute", word: "loading", why: "" };
  if (silentMs === null || silentMs > STALE_MS || problem !== null) {
    const heard = silentMs === null ? "" : `; what is shown is ${duration(Math.round(silentMs / 1000))} old`;
    return { tone: "bad", word: "unknown", why: `${problem ?? "the control plane does not answer"}${heard}` };
  }
  if (!summary) return { tone: "mute", word: "unknown job", why: "this control plane does not serve it" };
  return verdictOf(summary);
}

const TONES: Record<string, Health["tone"]> = {
  ok: "ok", info: "info", warning: "warn", critical: "bad", ended: "mute",
};

/** The control plane's verdict: the page adds nothing to it. */
export function verdictOf(summary: JobSummary): Health {
  const { level, word, line } = summary.verdict;
  return { tone: TONES[level] ?? "warn", word, why: line };
}
