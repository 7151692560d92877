/** The shell: session, job and view. */

import { type MouseEvent, type ReactNode, Suspense, lazy, useCallback, useEffect, useLayoutEffect, useMemo, useState } from "react";

import { ApiError, del, get, keepSessionKey, onSignedOut, sessionKey, signInWithCode } from "./api/client";
import type { JobSummary, SessionDocument } from "./api/schema";
import { VIEWS, type View, parseSignIn, placeHash } from "./lib/route";
import { Badge, Empty, Trouble } from "./ui/bits";
import { Boundary } from "./ui/boundary";
import { Provider, useShared } from "./ui/context";
import { go, usePlace, usePoll } from "./ui/hooks";
import { Help, TITLES, useKeys } from "./ui/keys";
import { OtherToken, SignIn } from "./ui/signin";
import { Pause } from "./views/pause";
import { useTheme } from "./ui/theme";

const SCREENS: Record<View, ReturnType<typeof lazy>> = {
  overview: lazy(() => import("./views/overview")),
  runs: lazy(() => import("./views/runs")),
  mesh: lazy(() => import("./views/mesh")),
  params: lazy(() => import("./views/params")),
  grads: lazy(() => import("./views/grads")),
  edits: lazy(() => import("./views/edits")),
  exports: lazy(() => import("./views/exports")),
  alerts: lazy(() => import("./views/alerts")),
  system: lazy(() => import("./views/system")),
};

const DEAD_LINK =
  "This link has been used, or is older than a minute. Run paramd dashboard again, or give a token.";

const OVER = "Your session has ended: the token was revoked or has expired, or the control plane was restarted. Sign in again.";

/** Takes the code of a sign-in link out of the address, so that it stays in no history. */
function takeCode(): string {
  const found = parseSignIn(window.location.hash);
  if (found) window.history.replaceState(null, "", found.rest);
  return found?.code ?? "";
}

export function App(): ReactNode {
  const [session, setSession] = useState<SessionDocument | null>(null);
  const [code, setCode] = useState(takeCode);
  const [asked, setAsked] = useState(!sessionKey() && !code);
  const [problem, setProblem] = useState("");
  /** What a link of another token would do to the session that is open here. */
  const [other, setOther] = useState("");
  // A link that is pasted into an open tab changes the fragment alone.
  useEffect(() => {
    const onHash = (): void => {
      const found = takeCode();
      if (!found) return;
      window.dispatchEvent(new HashChangeEvent("hashchange"));
      setCode(found);
      setAsked(false);
    };
    window.addEventListener("hashchange", onHash, { capture: true });
    return () => window.removeEventListener("hashchange", onHash, { capture: true });
  }, []);
  const [dark, toggle] = useTheme();
  const [leaving, setLeaving] = useState(false);
  const leave = useCallback(() => setLeaving(true), []);
  useEffect(() => {
    if (!leaving) return;
    // The views are gone by now, and with them their questions: none is refused for want of a session.
    void del("/api/v1/session")
      .catch(() => undefined)
      .finally(() => {
        keepSessionKey("");
        setSession(null);
        setLeaving(false);
      });
  }, [leaving]);
  useEffect(
    () =>
      onSignedOut(() => {
        keepSessionKey("");
        setProblem((old) => old || OVER);
        setSession(null);
      }),
    [],
  );
  useEffect(() => {
    if (asked) return;
    // A link that was used, in a browser that is signed in, is a link to the page.
    const again = (error: unknown): Promise<SessionDocument> => {
      if (error instanceof ApiError && error.status === 409) setOther(error.message);
      return sessionKey() ? get("/api/v1/session") : Promise.reject(error);
    };
    (code ? signInWithCode(code).catch(again) : get("/api/v1/session"))
      .then((found) => {
        setProblem("");
        setSession(found);
      })
      .catch((error: unknown) => {
        if (code && error instanceof ApiError && error.status === 401) setProblem(DEAD_LINK);
        else if (!(error instanceof ApiError && error.status === 401)) setProblem(String(error));
      })
      .finally(() => setAsked(true));
  }, [asked, code]);
  if (!asked || leaving) return null;
  if (!session) return <SignIn problem={problem} onSignedIn={setSession} />;
  if (other) {
    const stay = (): void => setOther("");
    return <OtherToken text={other} code={code} stay={stay} onSignedIn={(found) => (setSession(found), stay())} />;
  }
  return <SignedIn session={session} dark={dark} toggle={toggle} signOut={leave} />;
}

function SignedIn(props: {
  session: SessionDocument;
  dark: boolean;
  toggle: () => void;
  signOut: () => void;
}): ReactNode {
  const { session, dark, toggle, signOut } = props;
  const place = usePlace();
  const jobs = usePoll("jobs", (signal) => get("/api/v1/jobs", { signal, patienceS: JOBS_PATIENCE_S }), JOBS_EVERY_MS);
  const all = jobs.data?.jobs ?? [];
  const job = place.job || all[0]?.job || "";
  useEffect(() => {
    if (!place.job && job) go({ ...place, job }, { replace: true });
  }, [place, job]);
  const [help, setHelp] = useState(false);
  const keys = useMemo(
    () => ({
      go: (view: View) => go({ job, view, query: {} }),
      help: () => setHelp(true),
      theme: toggle,
    }),
    [job, toggle],
  );
  useKeys(keys);
  const Screen = SCREENS[place.view];
  const known = all.some((one) => one.job === job);
  return (
    <Provider session={session} job={job} dark={dark} jobs={jobs}>
      <Title view={place.view} />
      <a className="skip" href="#main" onClick={skip}>
        Skip to the content
      </a>
      <div className="shell">
        <Side jobs={all} job={job} view={place.view} session={session} dark={dark} toggle={toggle} help={keys.help} signOut={signOut} />
        <main id="main" tabIndex={-1} key={`${job}/${place.view}`}>
          <Offline view={place.view} />
          {known ? <Pause /> : !jobs.data && <section className="training" />}
          {jobs.data && job && !known && place.view !== "runs" ? (
            <Unknown job={job} jobs={all} />
          ) : job ? (
            <Boundary>
              <Suspense fallback={<Empty>…</Empty>}>
                <Screen />
              </Suspense>
            </Boundary>
          ) : (
            jobs.data && <Empty>No job has registered yet. In a training script: paramd.attach(model, optimizer, job="…")</Empty>
          )}
        </main>
      </div>
      {help && <Help onClose={() => setHelp(false)} />}
    </Provider>
  );
}

const JOBS_EVERY_MS = 5000;
const JOBS_PATIENCE_S = 5;

/** Not by the link itself, whose fragment would be a place of the page. */
function skip(event: MouseEvent): void {
  event.preventDefault();
  document.getElementById("main")?.focus();
}

function Title(props: { view: View }): ReactNode {
  const { job, health } = useShared();
  // Not after the paint: the title would for a moment deny what the page says.
  useLayoutEffect(() => {
    const bad = health.tone === "bad" || health.tone === "warn" ? `(${health.word}) ` : "";
    document.title = `${bad}${job ? `${job} · ` : ""}${TITLES[props.view]} · paramd`;
  }, [job, health, props.view]);
  return null;
}

function Unknown(props: { job: string; jobs: readonly JobSummary[] }): ReactNode {
  const { job, jobs } = props;
  return (
    <>
      <h1>{job}</h1>
      <Trouble>
        This control plane does not serve a job of that name. It may run under another control plane, or have ended before this one started.
      </Trouble>
      <p>
        {jobs.length ? "Jobs here: " : "No job has registered here yet."}
        {jobs.map((one) => (
          <a key={one.job} className="spaced" href={placeHash({ job: one.job, view: "overview", query: {} })}>
            {one.job}
          </a>
        ))}
      </p>
    </>
  );
}

function Side(props: {
  jobs: readonly JobSummary[];
  job: string;
  view: View;
  session: SessionDocument;
  dark: boolean;
  toggle: () => void;
  help: () => void;
  signOut: () => void;
}): ReactNode {
  const { jobs, job, view, session, dark, toggle, help, signOut } = props;
  const { health } = useShared();
  const summary = jobs.find((one) => one.job === job);
  const open = (summary?.critical_count ?? 0) + (summary?.warning_count ?? 0);
  return (
    <header className="side">
      <div className="brand">
        <img src="/favicon.svg" alt="" />
        <span>paramd</span>
      </div>
      <select
        aria-label="Job"
        value={job}
        onChange={(event) => go({ job: event.target.value, view, query: {} })}
      >
        {jobs.map((one) => (
          <option key={one.job} value={one.job}>
            {one.job}
            {one.verdict.level === "ok" ? "" : ` (${one.verdict.word})`}
          </option>
        ))}
        {!summary && <option value={job}>{job || "no job"}</option>}
      </select>
      <nav aria-label="Views">
        {VIEWS.map((each) => (
          <a
            key={each}
            href={placeHash({ job, view: each, query: {} })}
            aria-current={each === view ? "page" : undefined}
            ref={each === view ? showLink : undefined}
          >
            {TITLES[each]}
            {each === "overview" && <Badge state={health.word} tone={health.tone} />}
            {each === "alerts" && open > 0 && (
              <span className={`badge ${summary?.critical_count ? "bad" : "warn"}`} aria-label={`${open} open alerts`}>
                {open}
              </span>
            )}
          </a>
        ))}
      </nav>
      <div className="foot">
        <div className="who">
          <div className="name" title={session.name}>
            {session.name}
          </div>
          <div>
            {session.role}
            {session.readonly ? ", read-only" : ""} · {session.version}
          </div>
        </div>
        <div className="row">
          <button type="button" onClick={toggle} aria-label={dark ? "Light theme" : "Dark theme"}>
            {dark ? "☀" : "☾"}
          </button>
          <button type="button" onClick={help} aria-label="Keyboard and filters">
            ?
          </button>
          <a href="/docs/" target="_blank" rel="noopener">
            Manual
          </a>
          <button type="button" onClick={signOut}>
            Sign out
          </button>
        </div>
      </div>
    </header>
  );
}

/** On a phone the views are a scrolling row. */
function showLink(link: HTMLAnchorElement | null): void {
  link?.scrollIntoView({ block: "nearest", inline: "center" });
}

/** Warns when the data shown is no longer updated. */
function Offline(props: { view: View }): ReactNode {
  const { job, live, health } = useShared();
  if (health.word === "unknown") {
    return (
      <Trouble>
        {/* The overview's verdict says it already. */}
        {props.view === "overview" ? "" : `${health.why}. `}Retrying; everything below is old. If the training has ended, so has this control plane: paramd dashboard --job {job} shows its records here, and its next start is served here again.
      </Trouble>
    );
  }
  if (live.problem && live.time_s > 0) {
    return (
      <p className="offline" role="status">
        The event stream is interrupted ({live.problem}); changes appear with the next poll.
      </p>
    );
  }
  return null;
}
