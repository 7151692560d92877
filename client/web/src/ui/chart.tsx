/** Line charts. Tooltips are drawn on the canvas, so names are never parsed as HTML. */

import type { LineSeriesOption } from "echarts/charts";
import type {
  DataZoomComponentOption,
  GridComponentOption,
  LegendComponentOption,
  MarkLineComponentOption,
  TooltipComponentOption,
} from "echarts/components";
import type { ComposeOption } from "echarts/core";
import { type ReactNode, Suspense, lazy } from "react";

import { type Happening, linesOf } from "../lib/timeline";

export type ChartOption = ComposeOption<
  | LineSeriesOption
  | DataZoomComponentOption
  | GridComponentOption
  | LegendComponentOption
  | MarkLineComponentOption
  | TooltipComponentOption
>;

/** The theme's colours, for canvases. */
export interface Ink {
  text: string;
  faint: string;
  line: string;
  back: string;
  series: string[];
}

export function inkOf(): Ink {
  const style = getComputedStyle(document.documentElement);
  const read = (name: string): string => style.getPropertyValue(name).trim();
  return {
    text: read("--text"),
    faint: read("--faint"),
    line: read("--line"),
    back: read("--panel"),
    series: [1, 2, 3, 4, 5, 6].map((n) => read(`--series-${n}`)),
  };
}

export interface ChartProps {
  label: string;
  height: number;
  /** The option is rebuilt when one of these changes. */
  deps: readonly unknown[];
  option: (ink: Ink) => ChartOption;
  /** Charts of the same kind show their numbers at the place that is pointed at in one of them. */
  link?: string;
  /** The file of its numbers; without it what is drawn. */
  csv?: () => string;
  small?: boolean;
}

const EChart = lazy(() => import("./echart"));

export function Chart(props: ChartProps): ReactNode {
  return (
    <Suspense
      fallback={
        <>
          <div className="chart" style={{ height: props.height }} />
          <div className="chart-tools" />
        </>
      }
    >
      <EChart {...props} />
    </Suspense>
  );
}

/** An axis in the theme's colours. */
export function axis(ink: Ink, name: string, more: Record<string, unknown> = {}): Record<string, unknown> {
  return {
    name,
    nameLocation: "middle",
    nameGap: 24,
    nameTextStyle: { color: ink.faint },
    axisLine: { lineStyle: { color: ink.line } },
    axisLabel: { color: ink.faint, hideOverlap: true },
    splitLine: { lineStyle: { color: ink.line, opacity: 0.5 } },
    axisPointer: { label: { show: false } },
    ...more,
  };
}

/** Vertical lines, each with its kind, at those events that lie within the points drawn. */
export function eventLines(
  ink: Ink,
  events: readonly Happening[],
  begin: number,
  end: number,
  place: (one: Happening) => number | null,
  least: number,
): NonNullable<LineSeriesOption["markLine"]> {
  return {
    silent: true,
    symbol: "none",
    animation: false,
    lineStyle: { color: ink.faint, type: "dashed", width: 1 },
    label: { color: ink.faint, fontSize: 10, position: "insideEndTop", formatter: (line) => line.name },
    data: linesOf(events, begin, end, place, least),
  };
}
