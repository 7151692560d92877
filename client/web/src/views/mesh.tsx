/** Mesh: every rank on its mesh axes, with phase, step and age of its report. */

import { type ReactNode, useMemo } from "react";

import { get } from "../api/client";
import type { RankDocument } from "../api/schema";
import { bytes, count, duration, plural } from "../lib/format";
import { type Axis, axesOf, countBy, median, stragglers } from "../lib/mesh";
import { Badge, Facts, Panel, Source, Trouble } from "../ui/bits";
import { useMay, useShared, whyDead } from "../ui/context";
import { patchQuery, usePoll, useQuery } from "../ui/hooks";
import { phaseText, Tiles, type TileData, toneOfRank, wordOf } from "./mesh_tiles";
import { FieldMap } from "./mesh_field";
import { RankTable } from "./mesh_table";
import { ChartSpace } from "../ui/series";
import { StepTimes } from "./mesh_times";
import { hostRows } from "./mesh_host";
import { LogPanel } from "./mesh_log";
import { WhyPanel } from "./mesh_why";
import { Over } from "./remains";

/** Above this many ranks, cells of a map instead of tiles with text. */
const MAX_TILES = 128;

/** Large meshes are polled less often: their list is the control plane's most expensive response. */
export function pollMs(worldSize: number): number {
  if (worldSize <= 64) return 2000;
  return worldSize <= 1024 ? 5000 : 15_000;
}

export default function Mesh(): ReactNode {
  const { summary } = useShared();
  if (summary?.state !== "ended") return <Live />;
  return (
    <>
      <div className="head">
        <h1>Mesh</h1>
        <Badge state={summary.verdict.word} tone="mute" />
        <span>
          run {summary.incarnation} of {plural(summary.world_size, "rank")}
          {summary.step >= 0 ? `, ended after step ${count(summary.step)}` : ""}
        </span>
      </div>
      <Over what="their state and memory" />
      <StepTimes world={summary.world_size} incarnation={summary.incarnation} />
    </>
  );
}

function Live(): ReactNode {
  const { job, live, summary, health } = useShared();
  const world = summary?.world_size ?? 0;
  const ranks = usePoll(
    world ? `${job}/ranks` : null,
    (signal) => get("/api/v1/jobs/{job}/ranks", { path: { job }, signal }),
    pollMs(world),
  );
  const facts = usePoll(
    world ? `${job}/axes/${summary?.incarnation}` : null,
    (signal) => get("/api/v1/jobs/{job}/params", { path: { job }, query: { limit: 200 }, signal }),
    0,
  );
  const alerts = usePoll(
    `${job}/alerts`,
    (signal) => get("/api/v1/jobs/{job}/alerts", { path: { job }, query: { limit: 1000 }, signal }),
    30_000,
    live.changes["alert"] ?? 0,
  );
  const [picked] = useQuery("rank");
  const axes = useMemo(() => axesOf(facts.data?.params ?? [], world), [facts.data, world]);
  const all = ranks.data?.ranks ?? NO_RANKS;
  const namedText = (summary?.verdict.ranks ?? []).join(" ");
  const named = useMemo<ReadonlySet<number>>(() => new Set(namedText ? namedText.split(" ").map(Number) : []), [namedText]);
  const old = health.word === "unknown";
  const late = useMemo(() => stragglers(alerts.data?.alerts ?? [], named), [alerts.data, named]);
  const alertsOf = useMemo(() => {
    const found = new Map<number, string[]>();
    for (const alert of alerts.data?.alerts ?? []) {
      for (const rank of alert.ranks.filter((one) => named.has(one))) found.set(rank, [...(found.get(rank) ?? []), alert.reason]);
    }
    return found;
  }, [alerts.data, named]);
  const tiles = useMemo<TileData[]>(
    () =>
      all.map((rank) => ({
        ...rank,
        late: late.has(rank.rank),
        alertCount: (alertsOf.get(rank.rank) ?? []).length,
        named: named.has(rank.rank),
        old,
      })),
    [all, late, alertsOf, named, old],
  );
  const pick = (rank: number): void => patchQuery({ rank: String(rank) === picked ? "" : String(rank) });
  const chosen = picked === "" ? undefined : tiles.find((rank) => String(rank.rank) === picked);
  const alive = summary !== null && summary.state !== "ended" && whyDead(summary) === "";
  const step = summary ? Math.max(summary.step, live.incarnation === summary.incarnation ? live.step : -1) : -1;
  const axesText = axes.map((axis) => `${axis.name} ${axis.size}`).join(" × ");
  return (
    <>
      <div className="head">
        <h1>Mesh</h1>
        {summary && <Badge state={health.word} tone={health.tone} />}
        {summary && (
          <span>
            {count(summary.joined_count)} of {count(world)} ranks{step >= 0 ? ` · step ${count(step)}` : ""} · run {summary.incarnation}
          </span>
        )}
        <Source what={`/jobs/${job}/ranks`} at={ranks.at} error={ranks.error} busy={ranks.busy} refresh={ranks.refresh} />
      </div>
      {health.tone !== "ok" && health.tone !== "info" && !old && health.why && <Trouble>{health.why}</Trouble>}
      {ranks.error && <Trouble>{ranks.error}</Trouble>}
      <Totals ranks={tiles} alive={alive} />
      <Panel
        title="Ranks"
        source={<span className="source" title="From the placements of the parameters">axes {axesText}</span>}
      >
        {all.length === 0 && !ranks.error && <ChartSpace height={Math.min(world, 12) > 4 ? 220 : 120}>Loading …</ChartSpace>}
        {all.length > 0 && all.length <= MAX_TILES && (
          <Tiles ranks={tiles} at={ranks.at} axes={axes} picked={picked} onPick={pick} />
        )}
        {all.length > MAX_TILES && <FieldMap ranks={tiles} axes={axes} picked={picked} onPick={pick} />}
      </Panel>
      {picked !== "" && all.length === 0 && !ranks.error && <ChartSpace height={420}>Loading …</ChartSpace>}
      {chosen && <RankPanel rank={chosen} axes={axes} reasons={alertsOf.get(chosen.rank) ?? []} at={ranks.at} />}
      {chosen && <LogPanel key={`${job}/${chosen.rank}`} rank={chosen.rank} />}
      {(all.length > 0 || !ranks.error) && <RankTable ranks={tiles} at={ranks.at} picked={picked} onPick={pick} />}
      <WhyPanel world={alive ? world : 0} />
      <StepTimes world={world} incarnation={summary?.incarnation ?? -1} />
    </>
  );
}

const NO_RANKS: readonly RankDocument[] = [];

/** Of the ranks that are there: what one that is gone last said holds no memory and makes no steps. */
function Totals(props: { ranks: readonly TileData[]; alive: boolean }): ReactNode {
  const { alive } = props;
  const loading = props.ranks.length === 0;
  const ranks = props.ranks.filter((rank) => rank.membership === "joined" || rank.membership === "silent");
  const phases = [...countBy(ranks.filter((r) => r.membership === "joined"), (r) => r.phase)];
  const middle = alive ? median(ranks.filter((r) => r.step_time_ns > 0).map((r) => r.step_time_ns)) : Number.NaN;
  const sum = (key: "arena_bytes" | "snapshot_bytes" | "sidecar_rss_bytes" | "trainer_rss_bytes"): number =>
    ranks.reduce((total, rank) => total + rank[key], 0);
  return (
    <Panel title="Now">
      <Facts
        rows={[
          ["phases", loading ? "…" : phases.map(([phase, n]) => `${count(n)} ${phaseText(phase)}`).join(", ") || "–"],
          ["median step time", duration(middle / 1e9)],
          ["stragglers", alive ? count(ranks.filter((rank) => rank.late).length) : "–"],
          ["not ok", count(props.ranks.filter((rank) => wordOf(rank) !== "ok").length)],
          ["shared parameter memory", bytes(sum("arena_bytes"))],
          ["snapshot memory", bytes(sum("snapshot_bytes"))],
          ["trainers' memory", bytes(sum("trainer_rss_bytes"))],
          ["sidecars' memory", bytes(sum("sidecar_rss_bytes"))],
        ]}
      />
    </Panel>
  );
}

function RankPanel(props: {
  rank: TileData;
  axes: readonly Axis[];
  reasons: readonly string[];
  at: number;
}): ReactNode {
  const { rank, reasons, at } = props;
  const mayRead = useMay("read");
  const { job } = useShared();
  return (
    <Panel
      title={`Rank ${rank.rank}`}
      source={<Source what={`rank ${rank.rank}'s report`} at={at - rank.age_s * 1000} step={rank.step} />}
      actions={
        <button type="button" className="quiet" aria-label="Close" onClick={() => patchQuery({ rank: "" })}>
          ✕
        </button>
      }
    >
      {rank.reason && <Trouble>{rank.reason}</Trouble>}
      {reasons.map((reason) => (
        <Trouble key={reason}>{reason}</Trouble>
      ))}
      {!rank.agreement_works && rank.agreement_reason && <Trouble>{rank.agreement_reason}</Trouble>}
      <Facts
        rows={[
          ["state", <Badge key="s" state={wordOf(rank)} tone={toneOfRank(rank)} />],
          ["membership", rank.membership],
          ["phase", phaseText(rank.phase)],
          ["step", count(rank.step)],
          ["step time", `${duration(rank.step_time_ns / 1e9)}${rank.late ? " (straggler)" : ""}`],
          ["report age", duration(rank.age_s)],
          ["waited for copies", `${plural(rank.stall_count, "time")}, ${duration(rank.stall_total_ns / 1e9)}`],
          ["longest wait", duration(rank.stall_max_ns / 1e9)],
          ["copies abandoned", count(rank.abandoned_copy_count)],
          ["shared parameter memory", bytes(rank.arena_bytes)],
          ["snapshots", `${count(rank.snapshot_count)}, ${bytes(rank.snapshot_bytes)}`],
          ["sidecar", `pid ${rank.sidecar_pid}, ${bytes(rank.sidecar_rss_bytes)}`],
          ["trainer", rank.trainer_pid ? `pid ${rank.trainer_pid}, ${bytes(rank.trainer_rss_bytes)}` : "none in the sidecar's container"],
          ["agreement", rank.agreement_works ? "works" : "failed"],
          ["version", rank.version],
          ...hostRows(rank.host ?? null),
          ["parameters", mayRead ? <a key="p" href={`#/${encodeURIComponent(job)}/params?filter=rank%3D${rank.rank}`}>of this rank</a> : "–"],
        ]}
      />
    </Panel>
  );
}
