/** Shared by all views: the session, the job and its live events. */

import { createContext, useContext, useEffect, useMemo, useState, type ReactNode } from "react";

import type { JobList, JobSummary, SessionDocument } from "../api/schema";
import { follow } from "../api/sse";
import { urlOf } from "../api/client";
import { plural } from "../lib/format";
import { type Health, healthOf } from "../lib/health";
import { type Live, NOTHING, withEvent, withProblem } from "../lib/live";
import { type Polled, useNow, useSettled } from "./hooks";
import { useOutage } from "./outage";

export type Action = "view" | "read" | "logs" | "edit" | "edit-any" | "export" | "attach" | "administer";

interface Shared {
  session: SessionDocument;
  job: string;
  live: Live;
  dark: boolean;
  health: Health;
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
  const health = useHealth(jobs, summary);
  const shared = useMemo(
    () => ({ session, job, live, dark, health, summary, jobs: all }),
    [session, job, live, dark, health, summary, all],
  );
  return <Context.Provider value={shared}>{children}</Context.Provider>;
}

/** Alerts come in bursts. */
const NEWS_MS = 300;
const NO_JOBS: readonly JobSummary[] = [];

/** The same object until what it says changes: every second brings a new age, and no new health. */
function useHealth(jobs: Polled<JobList>, summary: JobSummary | null): Health {
  const now = useNow();
  const silentMs = jobs.at ? Math.max(0, now - jobs.at) : null;
  const outage = useOutage();
  // The first question that fails ends what was known: not only the next one for the list of jobs.
  const { tone, word, why } = healthOf({ summary, silentMs, problem: jobs.error ?? (outage || null) });
  return useMemo(() => ({ tone, word, why }), [tone, word, why]);
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
