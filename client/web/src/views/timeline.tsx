/** What happened to the job, newest first: edits, marks, exports, restarts, alerts, pauses. */

import { type ReactNode, useMemo } from "react";

import { get } from "../api/client";
import type { Edit, IncarnationRecord, Mark } from "../api/schema";
import { type Cause, causesOf } from "../lib/causes";
import { clock, count } from "../lib/format";
import { placeHash } from "../lib/route";
import { type Happening, type Kind, KINDS, timelineOf } from "../lib/timeline";
import { Badge, Choice, Empty, Name, Panel, Source, Trouble, toneOf } from "../ui/bits";
import { useShared } from "../ui/context";
import { type Polled, usePoll, useQuery } from "../ui/hooks";

const SHOWN = 40;

export interface History {
  causes: readonly Cause[];
  edits: readonly Edit[];
  timeline: readonly Happening[];
  marks: readonly Mark[];
  runs: readonly IncarnationRecord[];
  watch: boolean;
  at: number;
  error: string | null;
  busy: boolean;
  refresh: () => void;
}

/** Everything the timeline is made of, asked for again when an event says that it has changed. */
export function useHistory(): History {
  const { job, live, summary } = useShared();
  const path = { job };
  const { edit = 0, mark = 0, export: exported = 0, incarnation = 0, alert = 0 } = live.changes;
  const alerts = usePoll(
    `${job} alerts`,
    (signal) => get("/api/v1/jobs/{job}/alerts", { path, query: { state: "all", limit: 1000 }, signal }),
    30_000,
    alert,
  );
  const edits = usePoll(`${job} edits`, (signal) => get("/api/v1/jobs/{job}/edits", { path, query: { limit: 100 }, signal }), 60_000, edit);
  const exports = usePoll(
    `${job} exports`,
    (signal) => get("/api/v1/jobs/{job}/exports", { path, query: { limit: 100 }, signal }),
    60_000,
    exported,
  );
  const starts = usePoll(
    `${job} incarnations`,
    (signal) => get("/api/v1/jobs/{job}/incarnations", { path, signal }),
    60_000,
    incarnation,
  );
  const marks = usePoll(
    summary && summary.state !== "ended" ? `${job} marks` : null,
    (signal) => get("/api/v1/jobs/{job}/marks", { path, signal }),
    60_000,
    mark,
  );
  const causes = useMemo(() => causesOf(alerts.data?.alerts ?? [], summary?.cause), [alerts.data, summary?.cause]);
  const timeline = useMemo(
    () =>
      timelineOf({
        edits: edits.data?.edits ?? [],
        marks: marks.data?.marks ?? [],
        exports: exports.data?.exports ?? [],
        incarnations: starts.data?.incarnations ?? [],
        causes,
        recent: live.recent,
      }),
    [edits.data, marks.data, exports.data, starts.data, causes, live.recent],
  );
  const parts: readonly Polled<unknown>[] = [alerts, edits, exports, starts];
  return {
    causes,
    edits: edits.data?.edits ?? [],
    timeline,
    marks: marks.data?.marks ?? [],
    runs: starts.data?.incarnations ?? [],
    watch: alerts.data?.watch ?? false,
    at: Math.min(...parts.map((part) => part.at)),
    error: parts.find((part) => part.error)?.error ?? null,
    busy: parts.some((part) => part.busy),
    refresh: () => parts.forEach((part) => part.refresh()),
  };
}

const KIND_WORDS: Record<Kind, string> = { edit: "edits", mark: "restore points", export: "exports", restart: "runs", alert: "alerts", pause: "pauses" };
const SHOW = ["all", ...KINDS] as const;

export function Timeline(props: { history: History }): ReactNode {
  const { history } = props;
  const { job } = useShared();
  const [show, setShow] = useQuery("show", "all");
  const shown = history.timeline.filter((one) => show === "all" || one.kind === show);
  const several = new Set(history.timeline.flatMap((one) => (one.incarnation >= 0 ? one.incarnation : []))).size > 1;
  return (
    <Panel
      title="What changed"
      actions={<Choice label="Kinds" value={show as Kind | "all"} options={SHOW.map((kind) => [kind, kind === "all" ? "All" : KIND_WORDS[kind]] as const)} onChange={setShow} />}
      source={<Source what="edits, restore points, exports, runs, alerts" at={history.at} error={history.error} busy={history.busy} refresh={history.refresh} />}
    >
      {history.error && <Trouble>{history.error}</Trouble>}
      {history.at > 0 && shown.length === 0 && (
        <Empty>{show === "all" ? "Nothing has happened yet." : `No ${KIND_WORDS[show as Kind] ?? show} yet.`}{show === "pause" ? " Pauses are listed from when this page was opened; the audit has all." : ""}</Empty>
      )}
      <ol className="bare happenings" aria-label="Timeline">
        {shown.slice(0, SHOWN).map((one) => (
          <li key={one.key} data-kind={one.kind}>
            <span className="faint when">{clock(one.time_s)}</span>
            <Badge state={one.state} tone={toneOf(one.state)} />
            <a href={placeHash({ job, view: one.view, query: one.query })}>{{ restart: "run", mark: "restore point", pause: "pause" }[one.kind as string] ?? one.kind}</a>
            <span className="wrap what">{one.what}</span>
            <span className="faint">
              {one.who && (
                <>
                  by <Name>{one.who}</Name>
                </>
              )}
              {one.step >= 0 ? ` step ${count(one.step)}` : ""}
              {several && one.incarnation >= 0 && one.kind !== "restart" ? ` run ${one.incarnation}` : ""}
            </span>
          </li>
        ))}
      </ol>
      {shown.length > SHOWN && <p className="faint">and {count(shown.length - SHOWN)} earlier ones</p>}
    </Panel>
  );
}
