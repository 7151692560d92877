/** The one chart of numbers over a run: step or time, log scale, smoothing, events, linked cursors, CSV. */

import { type ReactNode, useMemo } from "react";

import { drawn, type Line, linesCsv, loneOf, type Mode, placeOf, stepAt } from "../lib/chart";
import { clockTick, count } from "../lib/format";
import { smooth } from "../lib/samples";
import type { Happening } from "../lib/timeline";
import { Choice, Empty } from "./bits";
import { axis, Chart, eventLines } from "./chart";
import { useShared } from "./context";
import { useQuery } from "./hooks";

/** How all charts of a view are drawn; kept in the address. */
export function useMode(): Mode {
  const [by] = useQuery("by", "step");
  const [log] = useQuery("log", "off");
  const [weight] = useQuery("smooth", "0");
  return useMemo(() => ({ by: by === "time" ? "time" : "step", log: log === "on", weight: Math.min(0.98, Math.max(0, Number(weight) || 0)) }), [by, log, weight]);
}

export function ModeControls(props: { alongSteps?: boolean }): ReactNode {
  const mode = useMode();
  const [, setBy] = useQuery("by", "step");
  const [, setLog] = useQuery("log", "off");
  const [, setWeight] = useQuery("smooth", "0");
  return (
    <>
      {!props.alongSteps && <Choice label="Against" value={mode.by} options={[["step", "Step"], ["time", "Clock"]] as const} onChange={setBy} />}
      <label className="tick">
        <input type="checkbox" checked={mode.log} onChange={(event) => setLog(event.target.checked ? "on" : "off")} /> log
      </label>
      <label className="tick">
        smooth
        <input type="range" min={0} max={0.98} step={0.02} value={mode.weight} onChange={(event) => setWeight(event.target.value)} />
      </label>
    </>
  );
}

/** The room of a chart that is not there yet: what stands below must not move. */
export function ChartSpace(props: { height: number; children: ReactNode }): ReactNode {
  return (
    <div className="chart-space" style={{ height: props.height }}>
      <Empty>{props.children}</Empty>
    </div>
  );
}

const NO_EVENTS: readonly Happening[] = [];
const MIN_SPAN_MS = 60_000;

export function SeriesChart(props: {
  label: string;
  unit: string;
  lines: readonly Line[];
  height: number;
  events?: readonly Happening[];
  /** Without the buttons for zooming: dragging and Ctrl with the wheel still do. */
  small?: boolean;
  /** Along steps, whatever the other charts do: of several runs. */
  alongSteps?: boolean;
}): ReactNode {
  const { label, unit, lines, height, events = NO_EVENTS, small = false } = props;
  const { job, dark } = useShared();
  const chosen = useMode();
  const mode = useMemo<Mode>(() => (props.alongSteps ? { ...chosen, by: "step" } : chosen), [chosen, props.alongSteps]);
  const { by, log, weight } = mode;
  const all = lines.flatMap((line) => line.points);
  const xs = all.flatMap((point) => placeOf(point, by) ?? []);
  const [begin, end] = xs.length ? [Math.min(...xs), Math.max(...xs)] : [0, 0];
  const times = by === "time";
  // An empty span of time would be drawn as two days.
  const span = times && end - begin < MIN_SPAN_MS ? { min: begin - MIN_SPAN_MS / 2, max: end + MIN_SPAN_MS / 2 } : {};
  const place = (one: Happening): number | null => (times ? 1000 * one.time_s : one.step >= 0 ? one.step : stepAt(lines[0]?.points ?? [], one.time_s));
  return (
    <Chart
      label={label}
      height={height}
      small={small}
      link={by}
      csv={() => linesCsv(job, lines)}
      deps={[lines, mode, dark, events]}
      option={(ink) => ({
        ...(lines.length > 1 ? { legend: { type: "scroll" as const, data: lines.map((line) => line.name), top: 0, right: 0, textStyle: { color: ink.faint }, itemWidth: 14, itemHeight: 3, icon: "rect" } } : {}),
        xAxis: axis(ink, times ? "" : "step", {
          type: times ? "time" : "value",
          scale: true,
          ...span,
          // Steps are whole: a chart of a few would else be ruled at halves.
          ...(times ? {} : { minInterval: 1 }),
          axisLabel: { color: ink.faint, hideOverlap: true, formatter: (x: number) => (times ? clockTick(x, (end - begin) / 1000) : count(x)) },
        }),
        yAxis: axis(ink, unit, { type: log ? "log" : "value", scale: true, nameGap: 50 }),
        series: lines.flatMap((line, at) => {
          const color = ink.series[at % ink.series.length]!;
          const values = line.points.map((point) => point.value);
          const data = drawn(line.points, values, mode);
          const [few, lone] = [line.points.length < 4, loneOf(data)];
          const one = {
            type: "line" as const,
            name: line.name,
            itemStyle: { color },
            // A point without neighbours is no line: only a dot shows it.
            showSymbol: few || lone.size > 0,
            symbolSize: (_: unknown, point: { dataIndex: number }) => (few || lone.has(point.dataIndex) ? 5 : 0),
            lineStyle: { width: 1.3, color, opacity: weight > 0 ? 0.3 : 1 },
            ...(at === 0 && events.length > 0 && { markLine: eventLines(ink, events, begin, end, place, times ? MIN_SPAN_MS : 1) }),
            data,
          };
          if (weight <= 0) return [one];
          const smoothed = { type: "line" as const, name: `${line.name}, smoothed`, itemStyle: { color }, showSymbol: false, lineStyle: { width: 2, color }, data: drawn(line.points, smooth(values, weight), mode) };
          return [one, smoothed];
        }),
      })}
    />
  );
}
