/** Norm over steps: the control plane's history and this page's samples. */

import { type ReactNode, useMemo } from "react";

import { get } from "../api/client";
import { withGaps } from "../lib/chart";
import { clockTick, count } from "../lib/format";
import { type Sample, smooth } from "../lib/samples";
import { Choice, Empty, Panel, Source } from "../ui/bits";
import { axis, Chart } from "../ui/chart";
import { useShared } from "../ui/context";
import { usePoll, useQuery } from "../ui/hooks";

interface Point {
  step: number;
  time_s: number;
  value: number | null;
}

export function NormPanel(props: { name: string; samples: readonly Sample[] }): ReactNode {
  const { name, samples } = props;
  const { job, dark } = useShared();
  const [log, setLog] = useQuery("log", "off");
  const [by, setBy] = useQuery("by", "step");
  const [weight, setWeight] = useQuery("smooth", "0");
  const history = usePoll(
    `${job} ${name} norm`,
    (signal) => get("/api/v1/jobs/{job}/history", { path: { job }, query: { metric: "norm", subject: name }, signal }),
    60_000,
  );
  const points = useMemo(() => merged(history.data?.points ?? [], history.data?.incarnation ?? -1, samples), [history.data, samples]);
  const smoothed = useMemo(() => smooth(points.map((point) => point.value), Number(weight)), [points, weight]);
  const noted = history.data?.points.length ?? 0;
  const x = (point: Point): number => (by === "time" ? point.time_s * 1000 : point.step);
  return (
    <Panel
      title="Norm over steps"
      actions={
        <>
          <Choice label="Against" value={by === "time" ? "time" : "step"} options={[["step", "Step"], ["time", "Clock"]] as const} onChange={setBy} />
          <label className="tick">
            <input type="checkbox" checked={log === "on"} onChange={(event) => setLog(event.target.checked ? "on" : "off")} /> log
          </label>
          <label className="tick">
            smooth
            <input type="range" min={0} max={0.98} step={0.02} value={weight} onChange={(event) => setWeight(event.target.value)} />
          </label>
        </>
      }
      source={<Source what="/history" at={history.at} error={history.error} />}
    >
      <p className="faint">
        {count(noted)} points from the control plane's history
        {history.data && !history.data.watch ? " (parameter sampling is off)" : ""}, {count(samples.length)} collected by this page
      </p>
      {points.length < 2 && <Empty>{points.length === 1 ? "Only one point so far." : "No points yet."}</Empty>}
      {points.length >= 2 && points.every((point) => point.value === null) && <Empty>No element was finite at any of these steps, so there is no norm to draw.</Empty>}
      {points.length >= 2 && points.some((point) => point.value !== null) && (
        <Chart
          label={`Norm at ${points.length} steps`}
          height={220}
          deps={[points, smoothed, log, by, dark]}
          option={(ink) => ({
            xAxis: axis(ink, by === "time" ? "" : "step", {
              type: by === "time" ? "time" : "value",
              scale: true,
              ...(by === "time" ? { axisLabel: { color: ink.faint, hideOverlap: true, formatter: (ms: number) => clockTick(ms, points.at(-1)!.time_s - points[0]!.time_s) } } : {}),
            }),
            yAxis: axis(ink, "norm", { type: log === "on" ? "log" : "value", scale: true, nameGap: 50 }),
            series: [
              {
                type: "line" as const,
                name: "norm",
                showSymbol: points.length < 40,
                symbolSize: 4,
                lineStyle: { width: 1.2, opacity: Number(weight) > 0 ? 0.3 : 1, color: ink.series[0]! },
                itemStyle: { color: ink.series[0]! },
                data: withGaps(points.map((point) => [x(point), positive(point.value, log)])),
              },
              ...(Number(weight) > 0
                ? [{ type: "line" as const, name: "smoothed", showSymbol: false, lineStyle: { width: 2, color: ink.series[1]! }, itemStyle: { color: ink.series[1]! }, data: withGaps(points.map((point, i) => [x(point), positive(smoothed[i] ?? null, log)])) }]
                : []),
            ],
          })}
        />
      )}
    </Panel>
  );
}

/** A log scale cannot show zero. */
function positive(value: number | null, log: string): number | string {
  return value === null || (log === "on" && value <= 0) ? "-" : Number(value.toPrecision(8));
}

function merged(
  noted: readonly { step: number; time_s: number; mean: number | null }[],
  incarnation: number,
  samples: readonly Sample[],
): Point[] {
  const of = new Map<number, Point>();
  for (const point of noted) of.set(point.step, { step: point.step, time_s: point.time_s, value: point.mean });
  for (const sample of samples) {
    if (incarnation >= 0 && sample.incarnation !== incarnation) continue;
    of.set(sample.step, { step: sample.step, time_s: sample.time_s, value: sample.stats.norm });
  }
  return [...of.values()].sort((a, b) => a.step - b.step);
}
