/** Firing and resolved alerts, and the hash-chained audit. */

import { type ReactNode, useCallback, useEffect, useState } from "react";

import { get } from "../api/client";
import type { AlertDocument, AuditPage, AuditRecord } from "../api/schema";
import { clock, count, duration } from "../lib/format";
import { placeHash } from "../lib/route";
import { Badge, Choice, Dialog, Empty, Name, Panel, Source, Trouble } from "../ui/bits";
import { useMay, useShared } from "../ui/context";
import { usePoll, useQuery } from "../ui/hooks";
import { type Column, Rows } from "../ui/rows";

type Wanted = "firing" | "resolved" | "all";

export default function Alerts(): ReactNode {
  const mayAudit = useMay("administer");
  return (
    <>
      <div className="head">
        <h1>Alerts &amp; audit</h1>
      </div>
      <AlertList />
      {mayAudit ? <Audit /> : <p className="faint">The audit is for admins.</p>}
    </>
  );
}

function AlertList(): ReactNode {
  const { job, live } = useShared();
  const [state, setState] = useQuery("state", "all");
  const [filter, setFilter] = useQuery("filter");
  const alerts = usePoll(
    `${job} ${state} ${live.changes["alert"] ?? 0}`,
    (signal) =>
      get("/api/v1/jobs/{job}/alerts", { path: { job }, query: { state: state as Wanted, limit: 1000 }, signal }),
    15_000,
  );
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  const shown = (alerts.data?.alerts ?? []).filter((alert) => {
    const text = `${alert.rule} ${alert.severity} ${alert.state} ${alert.subject} ${alert.reason}`.toLowerCase();
    return words.every((word) => text.includes(word));
  });
  return (
    <Panel
      title={`Alerts, ${count(alerts.data?.firing_count ?? 0)} firing`}
      actions={
        <>
          <Choice label="State" value={state as Wanted} options={[["firing", "Firing"], ["resolved", "Resolved"], ["all", "All"]] as const} onChange={setState} />
          <input type="search" data-filter aria-label="Filter alerts" placeholder="rule, subject, words   ( / )" value={filter} onChange={(event) => setFilter(event.target.value)} />
        </>
      }
      source={<Source what={`/jobs/${job}/alerts`} at={alerts.at} incarnation={alerts.data?.incarnation} error={alerts.error} busy={alerts.busy} refresh={alerts.refresh} />}
    >
      {alerts.error && <Trouble>{alerts.error}</Trouble>}
      {alerts.data && !alerts.data.watch && (
        <p className="faint">
          Parameters are not sampled, so NaN and jumps of norms raise no alerts. To turn sampling on, set <code>watch = true</code> in <code>[alerts]</code>.
        </p>
      )}
      {alerts.data && shown.length === 0 && <Empty>{filter ? "No alert matches the filter." : "No alerts."}</Empty>}
      <ul className="bare">
        {shown.slice(0, 200).map((alert) => (
          <Alert key={alert.id} alert={alert} />
        ))}
      </ul>
      {shown.length > 200 && <p className="faint">and {count(shown.length - 200)} more; narrow the filter</p>}
    </Panel>
  );
}

function Alert(props: { alert: AlertDocument }): ReactNode {
  const { alert } = props;
  const { job } = useShared();
  const ended = alert.resolved_s ?? Date.now() / 1000;
  return (
    <li className="alert" data-rule={alert.rule}>
      <div className="bar-row">
        <Badge state={alert.state === "firing" ? alert.severity : "resolved"} />
        <strong>{alert.rule}</strong>
        <span className="faint">
          {alert.resolved_s === null ? "since" : "from"} {clock(alert.first_seen_s)}, {duration(Math.max(0, ended - alert.first_seen_s))}, seen {count(alert.seen_count)}×
          {alert.step >= 0 ? `, step ${count(alert.step)}` : ""}
        </span>
        {alert.name && (
          <a href={placeHash({ job, view: "params", query: { name: alert.name } })}>
            <Name>{alert.name}</Name>
          </a>
        )}
        {alert.ranks.slice(0, 8).map((rank) => (
          <a key={rank} href={placeHash({ job, view: "mesh", query: { rank: String(rank) } })}>
            rank {rank}
          </a>
        ))}
      </div>
      <p className="wrap">{alert.reason}</p>
    </li>
  );
}

const COLUMNS: readonly Column<AuditRecord>[] = [
  { key: "seq", title: "#", width: "3.5rem", numeric: true, wide: true, render: (r) => r.seq },
  { key: "time", title: "when", width: "minmax(5rem, 8.6rem)", render: (r) => clock(r.time_ms / 1000) },
  { key: "method", title: "what", width: "minmax(7rem, 10rem)", render: (r) => <Name>{r.method}</Name> },
  { key: "actor", title: "who", width: "minmax(5rem, 9rem)", render: (r) => <Name>{r.actor || "–"}</Name> },
  { key: "kind", title: "kind", width: "5rem", wide: true, render: (r) => r.kind },
  { key: "result", title: "result", width: "8rem", render: (r) => <Name>{r.result ?? ""}</Name> },
  { key: "detail", title: "arguments", width: "minmax(12rem, 1fr)", render: (r) => <Name>{JSON.stringify(r.detail)}</Name> },
];

function Audit(): ReactNode {
  const { job } = useShared();
  const [chain, setChain] = useQuery("chain", "job");
  const [picked, setPicked] = useState<AuditRecord | null>(null);
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
      {first.data && (
        <p className="faint wrap">
          {count(first.data.anchor_seq)} records; hash of the last one, kept outside the store: <code>{first.data.anchor_hash.slice(0, 16)}…</code>{" "}
          (<code>paramd audit verify</code> checks the chain)
        </p>
      )}
      <Rows label="Audit" columns={COLUMNS} items={[...newest, ...below]} keyOf={(r) => String(r.seq)} onPick={setPicked} height="22rem" />
      {token && (
        <button type="button" onClick={more}>
          Older
        </button>
      )}
      {picked && (
        <Dialog title={`Record ${picked.seq}`} onClose={() => setPicked(null)}>
          <pre className="wrap">{pretty(picked.body)}</pre>
          <p className="faint wrap">
            hash <code>{picked.hash}</code>
          </p>
        </Dialog>
      )}
    </Panel>
  );
}

function pretty(body: string): string {
  try {
    return JSON.stringify(JSON.parse(body), null, 2);
  } catch {
    return body;
  }
}
