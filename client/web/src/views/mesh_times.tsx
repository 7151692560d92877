/** Step time over the run, from the control plane's history. */

import type { ReactNode } from "react";

import { get } from "../api/client";
import { clockTick } from "../lib/format";
import { MAX_POINTS, withGaps } from "../lib/chart";
import type { Happening } from "../lib/timeline";
import { Empty, Panel, Source, Trouble } from "../ui/bits";
import { axis, Chart, eventLines } from "../ui/chart";
import { useShared } from "../ui/context";
import { usePoll } from "../ui/hooks";

const MAX_LINES = 6;
const NO_EVENTS: readonly Happening[] = [];
const MIN_SPAN_MS = 60_000;
/** Above this many ranks the history has only min, median and max over all ranks. */
const MAX_RANKS_NOTED = 64;

export function StepTimes(props: { world: number; incarnation: number; events?: readonly Happening[] }): ReactNode {
  const { world, incarnation, events = NO_EVENTS } = props;
  const { job, dark } = useShared();
  const subjects =
    world > MAX_RANKS_NOTED
      ? ["min", "median", "max"]
      : Array.from({ length: Math.min(world, MAX_LINES) }, (_, i) => String(Math.round((i * (world - 1)) / Math.max(1, Math.min(world, MAX_LINES) - 1))));
  const found = usePoll(
    world > 0 ? `${job}/${incarnation}/times/${world}` : null,
    (signal) =>
      Promise.all(
        subjects.map((subject) =>
          get("/api/v1/jobs/{job}/history", { path: { job }, query: { metric: "step_time_s", subject, max_points: MAX_POINTS }, signal }),
        ),
      ),
    30_000,
  );
  const series = found.data ?? [];
  const times = series.flatMap((one) => one.points.map((point) => point.time_s * 1000));
  const points = times.length;
  const [begin, end] = [Math.min(...times), Math.max(...times)];
  // An empty time span would be drawn as two days.
  const span = end - begin < MIN_SPAN_MS ? { min: begin - MIN_SPAN_MS / 2, max: end + MIN_SPAN_MS / 2 } : {};
  return (
    <Panel
      title="Step time"
      source={<Source what={`/jobs/${job}/history`} at={found.at} error={found.error} busy={found.busy} />}
    >
      {found.error && <Trouble>{found.error}</Trouble>}
      {found.data && points === 0 && <Empty>No data yet; there is a sample every 10 s.</Empty>}
      {points > 0 && (
        <Chart
          label="Step time"
          height={200}
          deps={[found.data, dark, events]}
          option={(ink) => ({
            legend: { top: 0, right: 0, textStyle: { color: ink.faint }, itemWidth: 14, itemHeight: 3, icon: "rect" },
            xAxis: axis(ink, "", { type: "time", ...span, axisLabel: { color: ink.faint, hideOverlap: true, formatter: (ms: number) => clockTick(ms, (end - begin) / 1000) } }),
            yAxis: axis(ink, "ms", { type: "value", nameGap: 44, scale: true }),
            series: series.map((one, at) => ({
              ...(at === 0 && { markLine: eventLines(ink, events, begin, end) }),
              type: "line" as const,
              name: /^\d/.test(one.subject) ? `rank ${one.subject}` : one.subject,
              showSymbol: one.points.length < 4,
              symbolSize: 5,
              lineStyle: { width: 1.3 },
              // A rank without a finished step reports 0, which is no step time.
              data: withGaps(one.points.filter((point) => point.mean).map((point) => [point.time_s * 1000, Number((point.mean! * 1000).toPrecision(4))])),
            })),
          })}
        />
      )}
    </Panel>
  );
}
