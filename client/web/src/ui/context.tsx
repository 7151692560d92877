/** Shared by all views: the session, the job and its live events. */

import { createContext, useContext, useEffect, useMemo, useState, type ReactNode } from "react";

import type { JobList, JobSummary, SessionDocument } from "../api/schema";
import { follow } from "../api/sse";
import { get, urlOf } from "../api/client";
import { plural } from "../lib/format";
import { type Health, healthOf, UNCHECKED, type Values } from "../lib/health";
import { type Live, NOTHING, withEvent, withProblem } from "../lib/live";
import { type Polled, useNow, usePoll, useSettled } from "./hooks";
import { useOutage } from "./outage";

export type Action = "view" | "read" | "logs" | "edit" | "edit-any" | "export" | "attach" | "administer";

interface Shared {
  session: SessionDocument;
  job: string;
  live: Live;
  dark: boolean;
  health: Health;
  values: Values;
  summary: JobSummary | null;
  jobs: readonly JobSummary[];
}

const Context = createContext<Shared | null>(null);

export function useShared(): Shared {
  const found = useContext(Context);
  if (!found) throw new Error("used outside of <Provider>");
  return found;
}

const OF_TRAINING: ReadonlySet<Action> = new Set(["edit", "edit-any", "export", "attach"]);
/** What needs the trainers to reach a step; their memory is read, and written to disk, without them. */
const OF_TRAINERS: ReadonlySet<Action> = new Set(["edit", "edit-any"]);

/** Why no trainer can do anything; empty: some are alive, or may yet come. */
export function whyDead(summary: JobSummary | null): string {
  if (!summary || summary.alive_count > 0 || summary.state === "ended" || summary.state === "starting") return "";
  return `0 of ${plural(summary.world_size, "trainer")} ${summary.world_size === 1 ? "is" : "are"} alive; to go on, start the training again`;
}

/** Whether the token allows it, whatever the training does. */
export function useHas(action: Action): boolean {
  return useShared().session.actions.includes(action);
}

/** Why it cannot be done; empty: it can. */
export function useWhyNot(action: Action): string {
  const { session, summary } = useShared();
  if (summary?.state === "ended" && OF_TRAINING.has(action)) return "The job has ended; what is shown is what was recorded";
  if (OF_TRAINERS.has(action) && session.actions.includes(action)) return whyDead(summary);
  if (session.actions.includes(action)) return "";
  return session.readonly ? "This control plane is read-only" : `The role ${session.role} may not ${action}`;
}

/** Whether it can be done; controls for other actions are not rendered. */
export function useMay(action: Action): boolean {
  return useWhyNot(action) === "";
}

export function Provider(props: {
  session: SessionDocument;
  job: string;
  dark: boolean;
  jobs: Polled<JobList>;
  children: ReactNode;
}): ReactNode {
  const { session, job, dark, jobs, children } = props;
  const live = useEvents(job);
  // The list of jobs counts alerts: it must not say "none" for long while one fires.
  const news = useSettled(live.changes["alert"] ?? 0, NEWS_MS);
  const { refresh } = jobs;
  useEffect(() => {
    if (news > 0) refresh();
  }, [news, refresh]);
  const all = jobs.data?.jobs ?? NO_JOBS;
  const summary = all.find((one) => one.job === job) ?? null;
  const values = useValues(job, summary);
  const health = useHealth(jobs, summary, values);
  const shared = useMemo(
    () => ({ session, job, live, dark, health, values, summary, jobs: all }),
    [session, job, live, dark, health, values, summary, all],
  );
  return <Context.Provider value={shared}>{children}</Context.Provider>;
}

/** Alerts come in bursts. */
const NEWS_MS = 300;
const NO_JOBS: readonly JobSummary[] = [];

/** The same object until what it says changes: every second brings a new age, and no new health. */
function useHealth(jobs: Polled<JobList>, summary: JobSummary | null, values: Values): Health {
  const now = useNow();
  const silentMs = jobs.at ? Math.max(0, now - jobs.at) : null;
  const outage = useOutage();
  // The first question that fails ends what was known: not only the next one for the list of jobs.
  const { tone, word, why } = healthOf({ summary, values, silentMs, problem: jobs.error ?? (outage || null) });
  return useMemo(() => ({ tone, word, why }), [tone, word, why]);
}

const CHECK_EVERY_MS = 60_000;
/** Larger models are read only by the control plane's own watch, a part at a time. */
const MAX_CHECKED = 1000;
const MAX_CHECKED_NUMEL = 1e8;

/** Whether the parameters' values are finite: what the control plane's watch says, else looked at once a minute. */
function useValues(job: string, summary: JobSummary | null): Values {
  const alive = summary !== null && summary.state !== "ended" && summary.joined_count > 0;
  const found = usePoll<Values>(
    alive ? `${job}/${summary.incarnation}/values` : null,
    (signal) => valuesOf(job, signal),
    CHECK_EVERY_MS,
  );
  const [data, error] = [found.data, found.error];
  return useMemo(() => (error ? { ...UNCHECKED, why: error } : (data ?? UNCHECKED)), [data, error]);
}

async function valuesOf(job: string, signal: AbortSignal): Promise<Values> {
  const path = { job };
  const alerts = await get("/api/v1/jobs/{job}/alerts", { path, query: { limit: MAX_CHECKED }, signal });
  const found = alerts.alerts.filter((alert) => alert.rule === "non-finite");
  // The control plane samples the values itself: reading them here would tell nothing more.
  if (found.length > 0 || alerts.watch) return { bad: found.length, first: found.at(-1)?.subject ?? "", why: "" };
  let why = "the model is too large to be read every minute";
  if (await isSmall(job, signal)) {
    const stats = await get("/api/v1/jobs/{job}/params/stats", { path, query: { filter: "*" }, signal });
    const bad = stats.stats.filter((row) => row.nan_count + row.inf_count > 0);
    const missing = stats.missing[0];
    // Tensors of ranks that are away, or too small for this role, are not known.
    if (bad.length > 0 || !missing) return { bad: bad.length, first: bad[0]?.name ?? "", why: "" };
    why = `${missing.name}: ${missing.reason}`;
  }
  return { ...UNCHECKED, why: `${why}, and the control plane does not look for NaN and Inf (watch in [alerts])` };
}

async function isSmall(job: string, signal: AbortSignal): Promise<boolean> {
  const list = (limit: number) => get("/api/v1/jobs/{job}/params", { path: { job }, query: { limit }, signal });
  // The names of a model that is large anyway need not be sent to count them.
  if ((await list(1)).total_count > MAX_CHECKED) return false;
  const numel = (await list(MAX_CHECKED)).params.reduce((sum, one) => sum + one.numel, 0);
  return numel <= MAX_CHECKED_NUMEL;
}

function useEvents(job: string): Live {
  const [live, setLive] = useState<Live>(NOTHING);
  useEffect(() => {
    setLive(NOTHING);
    if (!job) return;
    const controller = new AbortController();
    const url = urlOf("/api/v1/jobs/{job}/events", { job });
    void follow(
      url,
      {
        onEvent: (event) => setLive((old) => withEvent(old, event)),
        onState: (problem) => setLive((old) => withProblem(old, problem)),
      },
      controller.signal,
    );
    return () => controller.abort();
  }, [job]);
  return live;
}
