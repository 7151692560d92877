/** ECharts with only the parts in use; loaded with the first chart. */

import { LineChart } from "echarts/charts";
import { DataZoomInsideComponent, GridComponent, LegendComponent, MarkLineComponent, TooltipComponent } from "echarts/components";
import { type ECharts, init, use } from "echarts/core";
import { CanvasRenderer } from "echarts/renderers";
import { type ReactNode, useEffect, useRef, useState } from "react";

import { csvOf, type Named, zoomed } from "../lib/chart";
import { type ChartOption, type ChartProps, type Ink, inkOf } from "./chart";
import { save } from "./save";

use([LineChart, DataZoomInsideComponent, GridComponent, LegendComponent, MarkLineComponent, TooltipComponent, CanvasRenderer]);

export default function EChart(props: ChartProps): ReactNode {
  const box = useRef<HTMLDivElement>(null);
  const [span, setSpan] = useState<[number, number]>(WHOLE);
  const chart = useRef<ECharts | null>(null);
  useEffect(() => {
    const element = box.current;
    if (!element) return;
    const made = init(element, null, { renderer: "canvas" });
    chart.current = made;
    const observer = new ResizeObserver(() => made.resize());
    observer.observe(element);
    // By wheel with Ctrl, by dragging, by pinching: the buttons must know.
    made.on("datazoom", () => setSpan(spanOf(made)));
    return () => {
      observer.disconnect();
      made.dispose();
      chart.current = null;
    };
  }, []);
  useEffect(() => {
    const ink = inkOf();
    const [start, end] = span;
    chart.current?.setOption({ ...common(ink), ...props.option(ink), dataZoom: [{ ...ZOOM, start, end }] }, { notMerge: true });
    // The option depends only on `deps`, which include the theme.
  }, props.deps);
  const zoom = (next: [number, number]): void => {
    setSpan(next);
    chart.current?.dispatchAction({ type: "dataZoom", start: next[0], end: next[1] });
  };
  const series = (): Named[] => (chart.current?.getOption() as { series?: Named[] } | undefined)?.series ?? [];
  const picture = (): void => {
    box.current?.querySelector("canvas")?.toBlob((blob) => blob && save(`${props.label}.png`, blob));
  };
  const whole = span[0] <= 0 && span[1] >= 100;
  return (
    <>
      <div ref={box} className="chart" role="img" aria-label={props.label} style={{ height: props.height }} />
      <div className="chart-tools" role="group" aria-label={`Tools of the chart: ${props.label}`}>
        <button type="button" className="small" aria-label="Zoom in" onClick={() => zoom(zoomed(span, 0.5, 0))}>+</button>
        <button type="button" className="small" aria-label="Zoom out" disabled={whole} onClick={() => zoom(zoomed(span, 2, 0))}>−</button>
        <button type="button" className="small" aria-label="Earlier" disabled={span[0] <= 0} onClick={() => zoom(zoomed(span, 1, -0.5))}>←</button>
        <button type="button" className="small" aria-label="Later" disabled={span[1] >= 100} onClick={() => zoom(zoomed(span, 1, 0.5))}>→</button>
        <button type="button" className="small" disabled={whole} onClick={() => zoom(WHOLE)}>Whole</button>
        <button type="button" className="small" onClick={() => save(`${props.label}.csv`, csvOf(series()))}>CSV</button>
        <button type="button" className="small" onClick={() => void navigator.clipboard?.writeText(csvOf(series()))}>Copy</button>
        <button type="button" className="small" onClick={picture}>PNG</button>
      </div>
    </>
  );
}

const WHOLE: [number, number] = [0, 100];
// Without Ctrl the wheel scrolls the page.
const ZOOM = { type: "inside", zoomOnMouseWheel: "ctrl", moveOnMouseMove: true, moveOnMouseWheel: false, filterMode: "none" } as const;

function spanOf(chart: ECharts): [number, number] {
  const option = chart.getOption() as { dataZoom?: { start?: number; end?: number }[] };
  return [option.dataZoom?.[0]?.start ?? 0, option.dataZoom?.[0]?.end ?? 100];
}

function common(ink: Ink): ChartOption {
  return {
    animation: false,
    color: ink.series,
    textStyle: { color: ink.faint, fontFamily: "inherit" },
    grid: { left: 64, right: 16, top: 16, bottom: 36 },
    tooltip: {
      trigger: "axis",
      renderMode: "richText",
      confine: true,
      backgroundColor: ink.back,
      borderColor: ink.line,
      textStyle: { color: ink.text, fontSize: 12 },
    },
  };
}
