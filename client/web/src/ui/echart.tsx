/** ECharts with only the parts in use; loaded with the first chart. */

import { LineChart } from "echarts/charts";
import { GridComponent, LegendComponent, TooltipComponent } from "echarts/components";
import { type ECharts, init, use } from "echarts/core";
import { CanvasRenderer } from "echarts/renderers";
import { type ReactNode, useEffect, useRef } from "react";

import { type ChartOption, type ChartProps, type Ink, inkOf } from "./chart";

use([LineChart, GridComponent, LegendComponent, TooltipComponent, CanvasRenderer]);

export default function EChart(props: ChartProps): ReactNode {
  const box = useRef<HTMLDivElement>(null);
  const chart = useRef<ECharts | null>(null);
  useEffect(() => {
    const element = box.current;
    if (!element) return;
    const made = init(element, null, { renderer: "canvas" });
    chart.current = made;
    const observer = new ResizeObserver(() => made.resize());
    observer.observe(element);
    return () => {
      observer.disconnect();
      made.dispose();
      chart.current = null;
    };
  }, []);
  useEffect(() => {
    const ink = inkOf();
    chart.current?.setOption({ ...common(ink), ...props.option(ink) }, { notMerge: true });
    // The option depends only on `deps`, which include the theme.
  }, props.deps);
  return (
    <div ref={box} className="chart" role="img" aria-label={props.label} style={{ height: props.height }} />
  );
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
