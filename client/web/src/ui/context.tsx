/** Shared by all views: the session, the job and its live events. */

import { createContext, useContext, useEffect, useMemo, useState, type ReactNode } from "react";

import type { SessionDocument } from "../api/schema";
import { follow } from "../api/sse";
import { urlOf } from "../api/client";
import { type Live, NOTHING, withEvent, withProblem } from "../lib/live";

export type Action = "view" | "read" | "edit" | "edit-any" | "export" | "attach" | "administer";

interface Shared {
  session: SessionDocument;
  job: string;
  live: Live;
  dark: boolean;
}

const Context = createContext<Shared | null>(null);

export function useShared(): Shared {
  const found = useContext(Context);
  if (!found) throw new Error("used outside of <Provider>");
  return found;
}

/** Whether the session may do it; controls for other actions are not rendered. */
export function useMay(action: Action): boolean {
  return useShared().session.actions.includes(action);
}

export function Provider(props: {
  session: SessionDocument;
  job: string;
  dark: boolean;
  children: ReactNode;
}): ReactNode {
  const { session, job, dark, children } = props;
  const live = useEvents(job);
  const shared = useMemo(() => ({ session, job, live, dark }), [session, job, live, dark]);
  return <Context.Provider value={shared}>{children}</Context.Provider>;
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
