/** Firing and resolved alerts, and the hash-chained audit. */

import { type ReactNode, useCallback, useEffect, useMemo, useState } from "react";

import { get } from "../api/client";
import type { AuditPage, AuditRecord } from "../api/schema";
import { type Change, changesOf, resultOf } from "../lib/audit";
import { causesOf } from "../lib/causes";
import { clock, count, words } from "../lib/format";
import { Choice, Dialog, Empty, Facts, Name, Panel, Source, Trouble } from "../ui/bits";
import { useMay, useShared } from "../ui/context";
import { usePoll, useQuery } from "../ui/hooks";
import { type Column, Rows } from "../ui/rows";
import { ChartSpace } from "../ui/series";
import { CauseItem } from "./causes";
import { Watching } from "./watching";

type Wanted = "firing" | "resolved" | "all";

export default function Alerts(): ReactNode {
  const mayAudit = useMay("administer");
  const { session } = useShared();
  return (
    <>
      <div className="head">
        <h1>Alerts &amp; audit</h1>
      </div>
      <AlertList />
      {mayAudit ? (
        <Audit />
      ) : (
        <Panel title="Audit">
          <Empty>The audit is for admins; this token has the role {session.role}. Overview lists edits, exports and restarts with their authors.</Empty>
        </Panel>
      )}
    </>
  );
}

function AlertList(): ReactNode {
  const { job, live, summary } = useShared();
  const [state, setState] = useQuery("state", "all");
  const [filter, setFilter] = useQuery("filter");
  const [run, setRun] = useQuery("incarnation");
  const [picked] = useQuery("cause");
  const runs = usePoll(
    `${job} incarnations`,
    (signal) => get("/api/v1/jobs/{job}/incarnations", { path: { job }, signal }),
    0,
    live.changes["incarnation"] ?? 0,
  );
  const alerts = usePoll(
    `${job} ${state} ${run}`,
    (signal) =>
      get("/api/v1/jobs/{job}/alerts", {
        path: { job },
        query: { state: state as Wanted, limit: 1000, ...(run ? { incarnation: Number(run) } : {}) },
        signal,
      }),
    15_000,
    live.changes["alert"] ?? 0,
  );
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  const causes = useMemo(() => {
    const shown = (alerts.data?.alerts ?? []).filter((alert) => {
      const text = `${alert.rule} ${alert.severity} ${alert.state} ${alert.subject} ${alert.reason}`.toLowerCase();
      return words.every((word) => text.includes(word));
    });
    return causesOf(shown);
  }, [alerts.data, filter]);
  const known = runs.data?.incarnations ?? [];
  return (
    <Panel
      title={`Alerts, ${count(alerts.data?.firing_count ?? 0)} firing`}
      actions={
        <>
          <Choice label="State" value={state as Wanted} options={[["firing", "Firing"], ["resolved", "Resolved"], ["all", "All"]] as const} onChange={setState} />
          {known.length > 1 && (
            <select aria-label="Run" value={run} onChange={(event) => setRun(event.target.value)}>
              <option value="">run {summary?.incarnation}, the last</option>
              {known.filter((one) => one.incarnation !== summary?.incarnation).reverse().map((one) => (
                <option key={one.incarnation} value={one.incarnation}>
                  run {one.incarnation}
                </option>
              ))}
            </select>
          )}
          <input type="search" data-filter aria-label="Filter alerts" placeholder="rule, subject, words   ( / )" value={filter} onChange={(event) => setFilter(event.target.value)} />
        </>
      }
      source={<Source what={`/jobs/${job}/alerts`} at={alerts.at} incarnation={alerts.data?.incarnation} error={alerts.error} busy={alerts.busy} refresh={alerts.refresh} />}
    >
      {alerts.error && <Trouble>{alerts.error}</Trouble>}
      {!run && <Watching />}
      {!alerts.data && !alerts.error && <ChartSpace height={160}>Loading …</ChartSpace>}
      {alerts.data && causes.length === 0 && <Empty>{filter ? "No alert matches the filter." : `No ${state === "all" ? "" : `${state} `}alerts in run ${alerts.data.incarnation}.`}</Empty>}
      <ul className="bare" aria-label="Causes">
        {causes.slice(0, CAUSES_SHOWN).map((cause) => (
          <CauseItem key={cause.id} cause={cause} open={cause.id === picked} />
        ))}
      </ul>
      {causes.length > CAUSES_SHOWN && <p className="faint">and {count(causes.length - CAUSES_SHOWN)} more; narrow the filter</p>}
    </Panel>
  );
}

const CAUSES_SHOWN = 100;

const COLUMNS: readonly Column<Change>[] = [
  { key: "seq", title: "#", width: "3.5rem", numeric: true, wide: true, render: ({ record }) => record.seq },
  { key: "time", title: "when", width: "minmax(5rem, 8.6rem)", render: ({ record }) => clock(record.time_ms / 1000) },
  { key: "method", title: "what", width: "minmax(7rem, 10rem)", render: ({ record }) => <Name>{record.method}</Name> },
  { key: "actor", title: "who", width: "minmax(5rem, 9rem)", render: ({ record }) => <Name>{record.actor || "–"}</Name> },
  { key: "result", title: "result", width: "8rem", render: (change) => <Name>{resultOf(change)}</Name> },
  { key: "detail", title: "arguments", width: "minmax(12rem, 1fr)", wide: true, render: ({ record }) => words(record.detail) },
];

function Audit(): ReactNode {
  const { job } = useShared();
  const [chain, setChain] = useQuery("chain", "job");
  const [picked, setPicked] = useState<Change | null>(null);
  const [older, setOlder] = useState<{ records: AuditRecord[]; token: string } | null>(null);
  const ask = useCallback(
    (token: string, signal?: AbortSignal): Promise<AuditPage> => {
      const query = { limit: 200, ...(token ? { page_token: token } : {}) };
      return chain === "job"
        ? get("/api/v1/jobs/{job}/audit", { path: { job }, query, signal })
        : get("/api/v1/audit", { query, signal });
    },
    [chain, job],
  );
  const first = usePoll(`${job} ${chain}`, (signal) => ask("", signal), 10_000);
  useEffect(() => setOlder(null), [chain, job]);
  const newest = first.data?.records ?? [];
  // The first page shifts as records arrive; older records that were loaded stay.
  const below = (older?.records ?? []).filter((record) => record.seq < (newest.at(-1)?.seq ?? 0));
  const token = older ? older.token : (first.data?.next_page_token ?? "");
  const more = (): void => {
    void ask(token).then((page) =>
      setOlder((old) => ({ records: [...(old?.records ?? []), ...page.records], token: page.next_page_token })),
    );
  };
  return (
    <Panel
      title="Audit"
      actions={<Choice label="Chain" value={chain === "site" ? "site" : "job"} options={[["job", "This job"], ["site", "Control plane"]] as const} onChange={setChain} />}
      source={<Source what={chain === "job" ? `/jobs/${job}/audit` : "/audit"} at={first.at} error={first.error} busy={first.busy} refresh={first.refresh} />}
    >
      {first.error && <Trouble>{first.error}</Trouble>}
      <p className="faint wrap">
        Each record has the hash of the one before it; <code>paramd audit verify</code> checks them. A line is an action with its outcome: click it for all that was recorded.
      </p>
      {first.data && newest.length === 0 && <Empty>Nothing is recorded in this chain yet.</Empty>}
      <Rows label="Audit" columns={COLUMNS} items={changesOf([...newest, ...below])} keyOf={({ record }) => String(record.seq)} onPick={setPicked} height="22rem" />
      {token && (
        <button type="button" onClick={more}>
          Older
        </button>
      )}
      {picked && (
        <Dialog title={`Record ${picked.record.seq}`} onClose={() => setPicked(null)}>
          <Facts rows={told(picked.record.body)} />
          <p className="faint wrap">
            hash <code>{picked.record.hash}</code>
          </p>
          {picked.outcome && (
            <>
              <h3>Its outcome, record {picked.outcome.seq}</h3>
              <Facts rows={told(picked.outcome.body)} />
              <p className="faint wrap">
                hash <code>{picked.outcome.hash}</code>
              </p>
            </>
          )}
        </Dialog>
      )}
    </Panel>
  );
}

/** A record as pairs of words; one that cannot be read as it is. */
function told(body: string): [string, string][] {
  try {
    const found: unknown = JSON.parse(body);
    if (typeof found === "object" && found !== null) return Object.entries(found).map(([key, value]) => [key.replaceAll("_", " "), words(value)]);
  } catch {
    // As it is.
  }
  return [["record", body]];
}
