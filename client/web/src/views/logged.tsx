/** Numbers that the script logs (`attachment.log`), from the control plane's history. */

import type { ReactNode } from "react";

import { get } from "../api/client";
import { MAX_POINTS, withGaps } from "../lib/chart";
import { clock, clockTick, number } from "../lib/format";
import type { Happening } from "../lib/timeline";
import { Choice, Empty, Facts, Panel, Source, Trouble } from "../ui/bits";
import { axis, Chart, eventLines } from "../ui/chart";
import { useShared } from "../ui/context";
import { usePoll, useQuery } from "../ui/hooks";

const PREFIX = "log:";
const MAX_LINES = 8;
/** Numbers whose last value is shown beside each other. */
const MAX_LAST = 12;
const LAST_S = 600;

/** Metrics of logged numbers among all series, each with the ranks that log it. */
export function loggedOf(series: readonly { metric: string; subject: string }[]): Map<string, string[]> {
  const found = new Map<string, string[]>();
  for (const { metric, subject } of series) {
    if (metric.startsWith(PREFIX)) found.set(metric, [...(found.get(metric) ?? []), subject]);
  }
  return found;
}

export function LoggedNumbers(props: { incarnation: number; events: readonly Happening[] }): ReactNode {
  const { job, dark } = useShared();
  const [picked, setPicked] = useQuery("number");
  const series = usePoll(
    `${job}/${props.incarnation}/series`,
    (signal) => get("/api/v1/jobs/{job}/history/series", { path: { job }, query: { limit: 5000 }, signal }),
    30_000,
  );
  const logged = loggedOf(series.data?.series ?? []);
  const metric = logged.has(picked) ? picked : ([...logged.keys()][0] ?? "");
  const ranks = (logged.get(metric) ?? []).slice(0, MAX_LINES);
  const found = usePoll(
    metric ? `${job}/${props.incarnation}/${metric}/${ranks.join()}` : null,
    (signal) =>
      Promise.all(
        ranks.map((subject) => get("/api/v1/jobs/{job}/history", { path: { job }, query: { metric, subject, max_points: MAX_POINTS }, signal })),
      ),
    10_000,
  );
  const shown = [...logged].slice(0, MAX_LAST);
  const last = usePoll(
    shown.length ? `${job}/${props.incarnation}/last/${shown.map(([name]) => name).join()}` : null,
    (signal) =>
      Promise.all(
        shown.map(async ([name, [subject = "0"]]) => {
          const query = { metric: name, subject, begin_s: Date.now() / 1000 - LAST_S };
          const { points } = await get("/api/v1/jobs/{job}/history", { path: { job }, query, signal });
          return { name: name.slice(PREFIX.length), rank: subject, point: points.at(-1) };
        }),
      ),
    10_000,
  );
  const lines = found.data ?? [];
  const times = lines.flatMap((line) => line.points.map((point) => point.time_s * 1000));
  const [begin, end] = [Math.min(...times), Math.max(...times)];
  return (
    <Panel
      title="Logged metrics"
      source={<Source what={`/jobs/${job}/history`} at={found.at} error={found.error} busy={found.busy} />}
      actions={
        logged.size > 1 && (
          <Choice
            label="Number"
            value={metric}
            options={[...logged.keys()].map((one) => [one, one.slice(PREFIX.length)] as const)}
            onChange={setPicked}
          />
        )
      }
    >
      {(series.error ?? found.error) && <Trouble>{series.error ?? found.error}</Trouble>}
      {series.data && !metric && <Empty>None; the script may call attachment.log(loss=loss).</Empty>}
      {last.data && (
        <Facts
          rows={last.data.map(({ name, rank, point }) => [
            name,
            <span key={name} title={point ? `Rank ${rank}, at ${clock(point.time_s)}` : undefined}>
              {!point ? "none for 10 minutes" : point.mean === null ? "not finite" : number(point.mean, 5)}
            </span>,
          ])}
        />
      )}
      {lines.some((line) => line.points.length > 0) && (
        <Chart
          label={`${metric.slice(PREFIX.length)} over the run`}
          height={200}
          deps={[found.data, dark, props.events]}
          option={(ink) => ({
            legend: { top: 0, right: 0, textStyle: { color: ink.faint }, itemWidth: 14, itemHeight: 3, icon: "rect" },
            xAxis: axis(ink, "", { type: "time", axisLabel: { color: ink.faint, hideOverlap: true, formatter: (ms: number) => clockTick(ms, (end - begin) / 1000) } }),
            yAxis: axis(ink, metric.slice(PREFIX.length), { type: "value", scale: true, nameGap: 50 }),
            series: lines.map((line, at) => ({
              ...(at === 0 && { markLine: eventLines(ink, props.events, begin, end) }),
              type: "line" as const,
              name: `rank ${line.subject}`,
              showSymbol: line.points.length < 4,
              symbolSize: 5,
              lineStyle: { width: 1.3 },
              data: withGaps(line.points.filter((point) => point.mean !== null).map((point) => [point.time_s * 1000, Number(point.mean!.toPrecision(6))])),
            })),
          })}
        />
      )}
    </Panel>
  );
}
