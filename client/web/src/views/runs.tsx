/** All jobs of this control plane and their runs (incarnations); two runs compared. */

import { type ReactNode, useMemo } from "react";

import { get } from "../api/client";
import type { HistoryDocument, IncarnationRecord, JobSummary } from "../api/schema";
import { clock, count, duration, number, plural } from "../lib/format";
import { placeHash } from "../lib/route";
import { meanOf, parseRun, type Run, runText } from "../lib/runs";
import { Badge, Empty, Name, Panel, Source, Trouble } from "../ui/bits";
import { useShared } from "../ui/context";
import { patchQuery, usePlace, usePoll, useQuery } from "../ui/hooks";
import { ChartSpace, ModeControls, SeriesChart } from "../ui/series";
import { lineOf } from "./logged";

export default function Runs(): ReactNode {
  const { jobs, job } = useShared();
  return (
    <>
      <div className="head">
        <h1>Jobs &amp; runs</h1>
        <span className="faint">{plural(jobs.length, "job")} of this control plane</span>
      </div>
      <Jobs jobs={jobs} />
      {job && <RunsOf job={job} />}
      <Comparison />
    </>
  );
}

function toneOfJob(job: JobSummary): ReactNode {
  const alive = job.state !== "ended" && job.state !== "down";
  if (alive && job.critical_count > 0) return <Badge state="critical" />;
  if (job.state === "ok" && job.warning_count > 0) return <Badge state="warning" />;
  return <Badge state={job.state} />;
}

function Jobs(props: { jobs: readonly JobSummary[] }): ReactNode {
  const { jobs } = props;
  const place = usePlace();
  const [filter, setFilter] = useQuery("filter");
  const shown = jobs.filter((one) => `${one.job} ${one.state} ${one.reason}`.toLowerCase().includes(filter.toLowerCase().trim()));
  return (
    <Panel
      title="Jobs"
      actions={<input type="search" data-filter aria-label="Filter jobs" placeholder="name, state   ( / )" value={filter} onChange={(event) => setFilter(event.target.value)} />}
    >
      {shown.length === 0 && <Empty>{filter ? "No job matches the filter." : "No job has registered yet."}</Empty>}
      {shown.length > 0 && (
        <div className="scroll" tabIndex={0} role="region" aria-label="Jobs">
          <table className="plain roomy" aria-label="Jobs">
            <thead>
              <tr>
                <th>job</th>
                <th>state</th>
                <th className="num">alerts</th>
                <th className="num">ranks</th>
                <th className="num">step</th>
                <th className="num">run</th>
                <th>training</th>
                <th>why</th>
              </tr>
            </thead>
            <tbody>
              {shown.map((one) => (
                <tr key={one.job}>
                  <td>
                    <a href={placeHash({ job: one.job, view: "overview", query: {} })}>
                      <Name>{one.job}</Name>
                    </a>
                  </td>
                  <td>{toneOfJob(one)}</td>
                  <td className="num">
                    <a href={placeHash({ job: one.job, view: "alerts", query: {} })}>{count(one.critical_count + one.warning_count)}</a>
                  </td>
                  <td className="num">
                    {count(one.joined_count)} of {count(one.world_size)}
                  </td>
                  <td className="num">{one.step >= 0 ? count(one.step) : "–"}</td>
                  <td className="num">
                    <a href={placeHash({ job: one.job, view: "runs", query: place.query })} title={`Runs of ${one.job}`}>
                      {one.incarnation}
                    </a>
                  </td>
                  <td>{one.state === "ended" ? "ended" : one.pause}</td>
                  <td className="wrap">{one.reason}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </Panel>
  );
}

function RunsOf(props: { job: string }): ReactNode {
  const { job } = props;
  const { live } = useShared();
  const [a, setA] = useQuery("a");
  const [b, setB] = useQuery("b");
  const found = usePoll(
    `${job} incarnations`,
    (signal) => get("/api/v1/jobs/{job}/incarnations", { path: { job }, signal }),
    60_000,
    live.changes["incarnation"] ?? 0,
  );
  const rows = [...(found.data?.incarnations ?? [])].reverse();
  return (
    <Panel
      title={<>Runs of <Name>{job}</Name></>}
      source={<Source what={`/jobs/${job}/incarnations`} at={found.at} error={found.error} busy={found.busy} refresh={found.refresh} />}
    >
      {found.error && <Trouble>{found.error}</Trouble>}
      {!found.data && !found.error && <Empty>Loading …</Empty>}
      {found.data && rows.length === 0 && <Empty>No run is known.</Empty>}
      <div className="scroll" tabIndex={0} role="region" aria-label="Runs">
        <table className="plain roomy" aria-label="Runs">
          <thead>
            <tr>
              <th className="num">run</th>
              <th className="num">ranks</th>
              <th>began</th>
              <th>lasted</th>
              <th className="num">last step</th>
              <th>why it ended</th>
              <th>compare</th>
            </tr>
          </thead>
          <tbody>
            {rows.map((run) => {
              const key = `${job}@${run.incarnation}`;
              return (
                <tr key={run.incarnation}>
                  <td className="num">{run.incarnation}</td>
                  <td className="num">{count(run.world_size)}</td>
                  <td>{clock(run.began_s)}</td>
                  <td>{lasted(run)}</td>
                  <td className="num">{run.step >= 0 ? count(run.step) : "–"}</td>
                  <td className="wrap">{run.reason || (run.ended_s === null ? "running" : "")}</td>
                  <td>
                    <div className="actions">
                      <button type="button" className="small" aria-pressed={a === key} onClick={() => setA(a === key ? "" : key)}>
                        A
                      </button>
                      <button type="button" className="small" aria-pressed={b === key} onClick={() => setB(b === key ? "" : key)}>
                        B
                      </button>
                      <a href={placeHash({ job, view: "alerts", query: { incarnation: String(run.incarnation) } })}>alerts</a>
                    </div>
                  </td>
                </tr>
              );
            })}
          </tbody>
        </table>
      </div>
      <p className="faint">To compare with another job's run, choose A here, then the number of that job's run above, and B there: the choice is kept in the address.</p>
    </Panel>
  );
}

function lasted(run: IncarnationRecord): string {
  return duration((run.ended_s ?? Date.now() / 1000) - run.began_s);
}

const METRICS = [["step_time_s", "Step time"], ["norm", "Norm"], ["grad_norm", "Gradient norm"]] as const;
const LOGGED = "log:";

function Comparison(): ReactNode {
  const [a] = useQuery("a");
  const [b] = useQuery("b");
  const [asked, setMetric] = useQuery("metric");
  const [subject, setSubject] = useQuery("subject");
  const runs = useMemo(() => [parseRun(a), parseRun(b)].filter((run): run is Run => run !== null), [a, b]);
  const offered = usePoll(
    runs.length ? `${a} ${b} series` : null,
    (signal) => Promise.all(runs.map((run) => get("/api/v1/jobs/{job}/history/series", { path: { job: run.job }, query: { incarnation: run.incarnation, limit: 5000 }, signal }))),
    0,
  );
  // What the scripts log comes first: runs are compared by their loss.
  const metrics = useMemo<(readonly [string, string])[]>(() => {
    const all = (offered.data ?? []).flatMap((page) => page.series.map((one) => one.metric));
    return [...[...new Set(all)].filter((one) => one.startsWith(LOGGED)).map((one) => [one, one.slice(LOGGED.length)] as const), ...METRICS];
  }, [offered.data]);
  const metric = asked || metrics[0]![0];
  const title = metrics.find(([one]) => one === metric)?.[1] ?? metric;
  const subjects = useMemo(() => {
    const lists = (offered.data ?? []).map((page) => page.series.filter((one) => one.metric === metric).map((one) => one.subject));
    return [...new Set(lists.flat())].sort((x, y) => x.localeCompare(y, "en", { numeric: true }));
  }, [offered.data, metric]);
  const chosen = subjects.includes(subject) ? subject : (subjects[0] ?? "");
  const found = usePoll(
    runs.length && chosen ? `${a} ${b} ${metric} ${chosen}` : null,
    (signal) =>
      Promise.all(
        runs.map((run) =>
          get("/api/v1/jobs/{job}/history", {
            path: { job: run.job },
            query: { metric, subject: chosen, incarnation: run.incarnation },
            signal,
          }),
        ),
      ),
    0,
  );
  const series = found.data ?? [];
  const lines = useMemo(
    () =>
      (found.data ?? []).map((one, i) => {
        const { points } = lineOf("", one);
        const scaled = metric === "step_time_s" ? points.filter((point) => point.value !== 0).map((point) => ({ ...point, value: point.value === null ? null : 1000 * point.value })) : points;
        return { name: `${"AB"[i]}: ${runs[i] ? runText(runs[i]!) : ""}`, points: scaled };
      }),
    [found.data, metric, runs],
  );
  return (
    <Panel
      title="Compare two runs"
      actions={
        <>
          <select aria-label="Metric" value={metric} onChange={(event) => setMetric(event.target.value)}>
            {metrics.map(([one, shown]) => (
              <option key={one} value={one}>
                {shown}
              </option>
            ))}
          </select>
          <ModeControls alongSteps />
          {subjects.length > 0 && (
            <select aria-label="Series" value={chosen} onChange={(event) => setSubject(event.target.value)}>
              {subjects.map((one) => (
                <option key={one} value={one}>
                  {/^\d+$/.test(one) ? `rank ${one}` : one}
                </option>
              ))}
            </select>
          )}
          {runs.length > 0 && (
            <button type="button" onClick={() => patchQuery({ a: "", b: "", subject: "" })}>
              Clear
            </button>
          )}
        </>
      }
      source={<Source what="/history" at={found.at} error={found.error ?? offered.error} busy={found.busy} />}
    >
      {(found.error ?? offered.error) && <Trouble>{found.error ?? offered.error}</Trouble>}
      {runs.length < 2 && <Empty>Choose A and B among the runs above.</Empty>}
      {runs.length > 0 && offered.data && subjects.length === 0 && (
        <Empty>
          {metric === "norm" ? "No norms are kept of these runs: the watch was off." : metric === "grad_norm" ? "No gradient norms are kept of these runs: nobody followed gradients." : `Nothing is kept of ${title} in these runs.`}
        </Empty>
      )}
      {runs.length > 1 && !found.data && !found.error && !offered.error && (subjects.length > 0 || !offered.data) && <ChartSpace height={330}>Loading …</ChartSpace>}
      {series.length > 0 && <Both runs={runs} series={series} metric={metric} />}
      {series.some((one) => one.points.length > 0) && <SeriesChart label={`${title} of ${runs.map(runText).join(" and ")}`} unit={metric === "step_time_s" ? "ms" : title} lines={lines} height={260} alongSteps />}
    </Panel>
  );
}

function Both(props: { runs: readonly Run[]; series: readonly HistoryDocument[]; metric: string }): ReactNode {
  const { runs, series, metric } = props;
  const shown = (value: number | null): string => (value === null ? "–" : metric === "step_time_s" ? duration(value) : number(value, 5));
  return (
    <table className="plain narrow" aria-label="Both runs">
      <thead>
        <tr>
          <th>of</th>
          <th>run</th>
          <th className="num">mean</th>
          <th className="num">first</th>
          <th className="num">last</th>
          <th className="num">steps</th>
          <th className="num">not finite</th>
        </tr>
      </thead>
      <tbody>
        {series.map((one, i) => (
          <tr key={i}>
            <td>{"AB"[i]}</td>
            <td>{runText(runs[i]!)}</td>
            <td className="num">{shown(meanOf(one))}</td>
            <td className="num">{shown(one.points[0]?.mean ?? null)}</td>
            <td className="num">{shown(one.points.at(-1)?.mean ?? null)}</td>
            <td className="num">{one.points.length ? `${count(one.points[0]!.step)} to ${count(one.points.at(-1)!.step)}` : "–"}</td>
            <td className="num">{count(one.points.reduce((sum, point) => sum + point.nonfinite_count, 0))}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}
