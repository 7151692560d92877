/** System: stalls caused by copies, versions, leases, control plane metrics, events, tokens. */

import { type ReactNode, useMemo } from "react";

import { get, text } from "../api/client";
import type { RankDocument } from "../api/schema";
import { bytes, clock, count, duration, eventText } from "../lib/format";
import { countBy } from "../lib/mesh";
import { parseMetrics, sentencesOf } from "../lib/prometheus";
import { Bar, Empty, Facts, Panel, Source, Trouble } from "../ui/bits";
import { useMay, useShared } from "../ui/context";
import { usePoll } from "../ui/hooks";
import { type Column, Rows } from "../ui/rows";
import { pollMs } from "./mesh";
import { Tokens } from "./tokens";

export default function System(): ReactNode {
  const { session } = useShared();
  const mayRead = useMay("read");
  const admin = useMay("administer");
  return (
    <>
      <div className="head">
        <h1>System</h1>
        <span className="faint">
          control plane {session.version} · {session.name}, {session.role}
          {session.readonly ? " · read-only" : ""}
        </span>
      </div>
      <Stalls />
      {mayRead && <Leases />}
      <div className="two">
        <ControlPlane />
        <Happenings />
      </div>
      {admin && <Tokens />}
      {(!mayRead || !admin) && (
        <p className="faint">
          Not shown to the role {session.role}: {[mayRead ? "" : "leases of snapshots (readers)", admin ? "" : "tokens (admins)"].filter(Boolean).join(", ")}.
        </p>
      )}
    </>
  );
}

const stallColumns = (budgetS: number): readonly Column<RankDocument>[] => [
  { key: "rank", title: "rank", width: "4rem", numeric: true, render: (r) => r.rank },
  { key: "count", title: "waits", width: "5rem", numeric: true, render: (r) => count(r.stall_count) },
  { key: "mean", title: "mean wait", width: "6rem", numeric: true, render: (r) => duration(r.stall_count ? r.stall_total_ns / r.stall_count / 1e9 : 0) },
  { key: "max", title: "longest", width: "6rem", numeric: true, render: (r) => duration(r.stall_max_ns / 1e9) },
  { key: "share", title: "longest of budget", width: "minmax(8rem, 1fr)", render: (r) => <Bar share={r.stall_max_ns / 1e9 / budgetS} tone="info" label={`rank ${r.rank}: longest wait of the budget`} /> },
  { key: "given", title: "abandoned", width: "6.5rem", numeric: true, render: (r) => count(r.abandoned_copy_count) },
  { key: "agreement", title: "agreement", width: "6rem", wide: true, render: (r) => (r.agreement_works ? "works" : <span title={r.agreement_reason}>failed</span>) },
  { key: "version", title: "version", width: "6rem", wide: true, render: (r) => r.version || "–" },
];

function Stalls(): ReactNode {
  const { job } = useShared();
  const ranks = usePoll(`${job}/ranks`, (signal) => get("/api/v1/jobs/{job}/ranks", { path: { job }, signal }), pollMs(2000));
  const all = ranks.data?.ranks ?? [];
  const budgetS = ranks.data?.stall_budget_s ?? Number.POSITIVE_INFINITY;
  const columns = useMemo(() => stallColumns(budgetS), [budgetS]);
  const total = all.reduce((sum, rank) => sum + rank.stall_total_ns, 0) / 1e9;
  const waits = all.reduce((sum, rank) => sum + rank.stall_count, 0);
  const most = Math.max(0, ...all.map((rank) => rank.stall_max_ns / 1e9));
  const versions = [...countBy(all.filter((rank) => rank.version), (rank) => rank.version)];
  return (
    <Panel
      title="Stalls caused by copies"
      source={<Source what={`/jobs/${job}/ranks`} at={ranks.at} error={ranks.error} busy={ranks.busy} refresh={ranks.refresh} />}
    >
      {ranks.error && <Trouble>{ranks.error}</Trouble>}
      <Facts
        rows={[
          ["longest wait", duration(most)],
          ["budget", ranks.data ? duration(budgetS) : "–"],
          ["waits on all ranks", `${count(waits)}, ${duration(total)}`],
          ["sidecars' versions", versions.map(([version, n]) => `${version} (${count(n)})`).join(", ") || "–"],
        ]}
      />
      {all.length === 0 && !ranks.error && <Empty>Loading …</Empty>}
      <Rows label="Waits by rank" columns={columns} items={all} keyOf={(r) => String(r.rank)} height="18rem" />
    </Panel>
  );
}

function Leases(): ReactNode {
  const { job, live } = useShared();
  const found = usePoll(
    `${job}/snapshots`,
    (signal) => get("/api/v1/jobs/{job}/snapshots", { path: { job }, query: { limit: 64 }, signal }),
    10_000,
    live.changes["snapshot"] ?? 0,
  );
  const rows = (found.data?.ranks ?? []).flatMap((rank) => rank.snapshots.map((lease) => ({ rank: rank.rank, ...lease })));
  const used = (found.data?.ranks ?? []).reduce((sum, rank) => sum + rank.used_bytes, 0);
  const budget = (found.data?.ranks ?? []).reduce((sum, rank) => sum + rank.budget_bytes, 0);
  return (
    <Panel
      title={`Leases, ${count(rows.length)}`}
      source={<Source what={`/jobs/${job}/snapshots`} at={found.at} error={found.error} busy={found.busy} refresh={found.refresh} />}
    >
      {found.error && <Trouble>{found.error}</Trouble>}
      <Facts
        rows={[
          ["held over REST", count(found.data?.held.length ?? 0)],
          ["snapshot memory", bytes(used)],
          ["budget", bytes(budget)],
          ["ranks queried", count(found.data?.ranks.length ?? 0)],
        ]}
      />
      {found.data && rows.length === 0 && <Empty>No snapshots.</Empty>}
      {rows.length > 0 && (
        <div className="scroll">
          <table className="plain">
            <thead>
              <tr>
                <th>rank</th>
                <th>snapshot</th>
                <th className="num">step</th>
                <th className="num">size</th>
                <th className="num">lease left</th>
              </tr>
            </thead>
            <tbody>
              {rows.slice(0, 200).map((lease) => (
                <tr key={`${lease.rank} ${lease.name}`}>
                  <td>{lease.rank}</td>
                  <td className="mono">{lease.name}</td>
                  <td className="num">{lease.step < 0 ? "–" : count(lease.step)}</td>
                  <td className="num">{bytes(lease.size_bytes)}</td>
                  <td className="num">{duration(lease.lease_left_ms / 1000)}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </Panel>
  );
}

function ControlPlane(): ReactNode {
  const metrics = usePoll("metrics", async (signal) => parseMetrics(await text("/metrics", signal)), 30_000);
  return (
    <Panel title="Requests and rounds" source={<Source what="/metrics" at={metrics.at} error={metrics.error} busy={metrics.busy} refresh={metrics.refresh} />}>
      {metrics.error && <Trouble>{metrics.error}</Trouble>}
      {metrics.data && (
        <ul className="bare" aria-label="Requests and rounds">
          {sentencesOf(metrics.data).map((one) => (
            <li key={one}>{one}</li>
          ))}
        </ul>
      )}
      <p className="faint">
        <a href="/metrics">/metrics</a> has these and more numbers in the format of Prometheus.
      </p>
    </Panel>
  );
}

function Happenings(): ReactNode {
  const { job, live } = useShared();
  return (
    <Panel
      title="Events"
      source={<Source what={`/jobs/${job}/events`} at={live.time_s * 1000} step={live.step} error={live.problem} />}
    >
      {live.recent.length === 0 && <Empty>No events since this page was opened.</Empty>}
      <ul className="bare list-small" tabIndex={0} aria-label="Events" hidden={live.recent.length === 0}>
        {live.recent.map((event) => (
          <li key={event.id}>
            <span className="faint">{clock(event.time_s)}</span> <strong>{event.kind}</strong>{" "}
            <span className="wrap">{eventText(event.data)}</span>
          </li>
        ))}
      </ul>
    </Panel>
  );
}
