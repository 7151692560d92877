/** What an ended training leaves: the last values of what was watched, and its checkpoints. */

import { type ReactNode, useMemo } from "react";

import { get } from "../api/client";
import type { ExportInfo, HistoryDocument, SeriesDocument } from "../api/schema";
import { bytes, clock, count, duration, number } from "../lib/format";
import { placeHash } from "../lib/route";
import { Empty, Name, Panel, Source, Trouble } from "../ui/bits";
import { useShared } from "../ui/context";
import { usePoll } from "../ui/hooks";
import { ChartSpace } from "../ui/series";
import { placeOf, useRoots } from "./exports";

/** Last values that are asked for, one question each. */
const MOST = 24;
const LOGGED = "log:";

/** What was watched, what the script logged first; each logged number of one rank. Pure. */
export function watchedOf(series: readonly SeriesDocument[]): SeriesDocument[] {
  const seen = new Set<string>();
  const logged = series.filter((one) => one.metric.startsWith(LOGGED) && !seen.has(one.metric) && seen.add(one.metric));
  const total = series.filter((one) => one.metric === "grad_norm" && one.subject === "total");
  const times = series.filter((one) => one.metric === "step_time_s").slice(0, 1);
  const norms = series.filter((one) => one.metric === "norm");
  return [...logged, ...total, ...times, ...norms].slice(0, MOST);
}

/** A watched number in words. */
export function watchedText(one: Pick<SeriesDocument, "metric" | "subject">): string {
  if (one.metric.startsWith(LOGGED)) return one.metric.slice(LOGGED.length);
  if (one.metric === "grad_norm") return "norm of all gradients";
  return one.metric === "step_time_s" ? `step time, rank ${one.subject}` : `norm of ${one.subject}`;
}

function lastText(found: HistoryDocument): string {
  const last = found.points.at(-1);
  if (!last) return "–";
  if (last.mean === null) return "not finite";
  return found.metric === "step_time_s" ? duration(last.mean) : number(last.mean, 5);
}

export function Remains(): ReactNode {
  const { job, summary } = useShared();
  const number = summary?.incarnation ?? -1;
  const series = usePoll(`${job}/${number}/remains`, (signal) => get("/api/v1/jobs/{job}/history/series", { path: { job }, query: { limit: 5000 }, signal }), 0);
  const watched = useMemo(() => watchedOf(series.data?.series ?? []), [series.data]);
  const values = usePoll(
    watched.length ? `${job}/${number}/last/${watched.length}` : null,
    (signal) => Promise.all(watched.map(({ metric, subject }) => get("/api/v1/jobs/{job}/history", { path: { job }, query: { metric: metric as "norm", subject }, signal }))),
    0,
  );
  const error = series.error ?? values.error;
  const rows = (values.data ?? []).filter((one) => one.points.length > 0);
  return (
    <>
      <Checkpoints />
      <Panel title="Last values" source={<Source what={`/jobs/${job}/history`} at={values.at || series.at} error={error} busy={values.busy} />}>
        {error && <Trouble>{error}</Trouble>}
        {!error && (!series.data || (watched.length > 0 && !values.data)) && <ChartSpace height={120}>Loading …</ChartSpace>}
        {series.data && watched.length === 0 && <Empty>Nothing was watched or logged in this run.</Empty>}
        {rows.length > 0 && (
          <table className="plain narrow" aria-label="Last values">
            <thead>
              <tr>
                <th>what</th>
                <th className="num">last value</th>
                <th className="num">step</th>
                <th>when</th>
              </tr>
            </thead>
            <tbody>
              {rows.map((one) => (
                <tr key={`${one.metric} ${one.subject}`}>
                  <td>
                    <Name>{watchedText(one)}</Name>
                  </td>
                  <td className="num">{lastText(one)}</td>
                  <td className="num">{(one.points.at(-1)?.step ?? -1) >= 0 ? count(one.points.at(-1)?.step) : "–"}</td>
                  <td>{clock(one.points.at(-1)?.time_s ?? Number.NaN)}</td>
                </tr>
              ))}
            </tbody>
          </table>
        )}
        {watched.length === MOST && <p className="faint">At most {count(MOST)} are shown; a run in Jobs &amp; runs shows each over its steps.</p>}
      </Panel>
    </>
  );
}

/** The checkpoints that can be loaded, with where they are. */
export function Checkpoints(): ReactNode {
  const { job } = useShared();
  const roots = useRoots();
  const found = usePoll(`${job} checkpoints`, (signal) => get("/api/v1/jobs/{job}/exports", { path: { job }, query: { limit: 200, state: "DONE" }, signal }), 0);
  const whole = (found.data?.exports ?? []).filter((one: ExportInfo) => !one.removed);
  return (
    <Panel title="Checkpoints" source={<Source what={`/jobs/${job}/exports`} at={found.at} error={found.error} busy={found.busy} />}>
      {found.error && <Trouble>{found.error}</Trouble>}
      {found.data && whole.length === 0 && <Empty>This job has written no checkpoint.</Empty>}
      <ul className="bare" aria-label="Checkpoints">
        {whole.slice(0, 20).map((one) => (
          <li key={one.id} className="wrap">
            <a href={placeHash({ job, view: "exports", query: { export: one.id } })}>step {count(one.step)}</a> <span className="faint">{clock(one.created_s)}, {one.format}, {bytes(one.size_bytes)}:</span> <code>{placeOf(one, roots)}</code>
          </li>
        ))}
      </ul>
    </Panel>
  );
}

/** In place of what only ranks can tell. */
export function Over(props: { what: string }): ReactNode {
  const { job } = useShared();
  return (
    <>
      <Panel title="The training has ended">
        <p>
          Its ranks are gone, and with them {props.what}. <a href={placeHash({ job, view: "overview", query: {} })}>Overview</a> has its last values; a checkpoint has every value, and a restarted job shows them here again.
        </p>
      </Panel>
      <Checkpoints />
    </>
  );
}
