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

const TONES: Record<string, Health["tone"]> = {
  ok: "ok", starting: "info", paused: "warn", warning: "warn", degraded: "warn", critical: "bad", down: "bad", ended: "mute",
};

/** The control plane's verdict; the page adds only what it has read of the values itself. */
function ofSummary(summary: JobSummary, values: Values): Health {
  const { health: word, why } = summary;
  const tone = TONES[word] ?? "warn";
  if (word === "ended" || word === "down") return { tone, word, why };
  if (values.bad) {
    const more = values.bad > 1 ? ` and ${count(values.bad - 1)} more` : "";
    const told = why ? `; ${why}` : "";
    return { tone: "bad", word: "not finite", why: `NaN or infinities in ${values.first}${more}${told}` };
  }
  if (word === "ok" && values.bad === null) {
    return { tone: "info", word: "running", why: `whether values are finite is not known: ${values.why}` };
  }
  return { tone, word, why };
}
