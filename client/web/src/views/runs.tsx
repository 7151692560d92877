/** All jobs of this control plane and their runs (incarnations); two runs compared. */

import { type ReactNode, useMemo } from "react";

import { get } from "../api/client";
import type { HistoryDocument, IncarnationRecord, JobSummary, SeriesPage } from "../api/schema";
import { clock, count, duration, number, plural } from "../lib/format";
import { verdictOf } from "../lib/health";
import { placeHash } from "../lib/route";
import { meanOf, parseRun, type Run, runText } from "../lib/runs";
import { Badge, Empty, Name, Panel, Source, Trouble } from "../ui/bits";
import { useMay, useShared, whyDead } from "../ui/context";
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
      <OthersRuns />
      <Comparison />
    </>
  );
}

/** What the header and the overview say of a job. */
function Verdict(props: { of: JobSummary }): ReactNode {
  const { tone, word } = verdictOf(props.of);
  return <Badge state={word} tone={tone} />;
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
                <th>health</th>
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
                  <td>
                    <Verdict of={one} />
                  </td>
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
                  <td>{one.state === "ended" ? "ended" : whyDead(one) ? "–" : one.pause}</td>
                  <td className="wrap">{one.why}</td>
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
  const { live, jobs: served } = useShared();
  const found = usePoll(
    `${job} incarnations`,
    (signal) => get("/api/v1/jobs/{job}/incarnations", { path: { job }, signal }),
    60_000,
    live.changes["incarnation"] ?? 0,
  );
  const rows = (found.data?.incarnations ?? []).map((run) => ({ job, run })).reverse();
  return (
    <Panel
      title={<>Runs of <Name>{job}</Name></>}
      source={<Source what={`/jobs/${job}/incarnations`} at={found.at} error={found.error} busy={found.busy} refresh={found.refresh} />}
    >
      {found.error && <Trouble>{found.error}</Trouble>}
      {!found.data && !found.error && <Empty>Loading …</Empty>}
      {found.data && rows.length === 0 && <Empty>No run is known.</Empty>}
      <RunTable label="Runs" rows={rows} />
      {served.length > 1 && <p className="faint">To compare with another job's run, choose A here. Then click that job's run number in the table above, and choose B there. The page's address keeps the choice.</p>}
    </Panel>
  );
}

/** Runs of jobs that have a control plane of their own, as each job has by default: yesterday's is among them. */
function OthersRuns(): ReactNode {
  const mayAsk = useMay("administer");
  const found = usePoll(mayAsk ? "other jobs" : null, (signal) => get("/api/v1/other-jobs", { signal }), 60_000);
  const rows = (found.data?.jobs ?? []).flatMap(({ job, incarnations }) => [...incarnations].reverse().map((run) => ({ job, run })));
  if (!found.error && rows.length === 0) return null;
  return (
    <Panel title="Runs of other jobs of this user" source={<Source what="/other-jobs" at={found.at} error={found.error} busy={found.busy} refresh={found.refresh} />}>
      {found.error && <Trouble>{found.error}</Trouble>}
      <p className="faint">Read from these jobs' own records, whether they run or have ended. Choose runs to compare them below. <code>paramd dashboard --job NAME</code> shows one of them whole.</p>
      <RunTable label="Runs of other jobs" rows={rows.slice(0, OTHERS_SHOWN)} named />
      {rows.length > OTHERS_SHOWN && <p className="faint">and {count(rows.length - OTHERS_SHOWN)} older ones</p>}
    </Panel>
  );
}

const OTHERS_SHOWN = 50;

function RunTable(props: { label: string; rows: readonly { job: string; run: IncarnationRecord }[]; named?: boolean }): ReactNode {
  const { label, rows, named = false } = props;
  const [a, setA] = useQuery("a");
  const [b, setB] = useQuery("b");
  return (
    <div className="scroll" tabIndex={0} role="region" aria-label={label}>
      <table className="plain roomy" aria-label={label}>
        <thead>
          <tr>
            {named && <th>job</th>}
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
          {rows.map(({ job, run }) => {
            const key = `${job}@${run.incarnation}`;
            const what = `Run ${run.incarnation}${named ? ` of ${job}` : ""}`;
            return (
              <tr key={key}>
                {named && (
                  <td>
                    <Name>{job}</Name>
                  </td>
                )}
                <td className="num">{run.incarnation}</td>
                <td className="num">{count(run.world_size)}</td>
                <td>{clock(run.began_s)}</td>
                <td>{lasted(run)}</td>
                <td className="num">{run.step >= 0 ? count(run.step) : "–"}</td>
                <td className="wrap">{run.reason || (run.ended_s === null ? (named ? "no end is noted" : "running") : "")}</td>
                <td>
                  <div className="actions">
                    <button type="button" className="small" aria-label={`${what} as A`} aria-pressed={a === key} onClick={() => setA(a === key ? "" : key)}>
                      as A
                    </button>
                    <button type="button" className="small" aria-label={`${what} as B`} aria-pressed={b === key} onClick={() => setB(b === key ? "" : key)}>
                      as B
                    </button>
                    {!named && <a href={placeHash({ job, view: "alerts", query: { incarnation: String(run.incarnation) } })}>alerts</a>}
                  </div>
                </td>
              </tr>
            );
          })}
        </tbody>
      </table>
    </div>
  );
}

function lasted(run: IncarnationRecord): string {
  return duration((run.ended_s ?? Date.now() / 1000) - run.began_s);
}

const METRICS = [["step_time_s", "Step time"], ["norm", "Norm"], ["grad_norm", "Gradient norm"]] as const;
const LOGGED = "log:";

/** Of a job that is served here, or of another one's own records. */
function seriesOf(run: Run, here: boolean, signal: AbortSignal): Promise<SeriesPage> {
  const [path, query] = [{ job: run.job }, { incarnation: run.incarnation, limit: 5000 }];
  return here ? get("/api/v1/jobs/{job}/history/series", { path, query, signal }) : get("/api/v1/other-jobs/{job}/series", { path, query, signal });
}

function historyOf(run: Run, here: boolean, metric: string, subject: string, signal: AbortSignal): Promise<HistoryDocument> {
  const [path, query] = [{ job: run.job }, { metric, subject, incarnation: run.incarnation }];
  return here ? get("/api/v1/jobs/{job}/history", { path, query, signal }) : get("/api/v1/other-jobs/{job}/history", { path, query, signal });
}

function Comparison(): ReactNode {
  const { jobs } = useShared();
  const names = jobs.map((one) => one.job).join("/");
  const served = useMemo(() => new Set(names.split("/")), [names]);
  const [a] = useQuery("a");
  const [b] = useQuery("b");
  const [asked, setMetric] = useQuery("metric");
  const [subject, setSubject] = useQuery("subject");
  const runs = useMemo(() => [parseRun(a), parseRun(b)].filter((run): run is Run => run !== null), [a, b]);
  const offered = usePoll(
    runs.length ? `${a} ${b} series` : null,
    (signal) => Promise.all(runs.map((run) => seriesOf(run, served.has(run.job), signal))),
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
          historyOf(run, served.has(run.job), metric, chosen, signal),
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
      {runs.length < 2 && <Empty>Choose A and B among the runs above, also of other jobs.</Empty>}
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
