/** ECharts with only the parts in use; loaded with the first chart. */

import { LineChart } from "echarts/charts";
import { DataZoomInsideComponent, GridComponent, LegendScrollComponent as LegendComponent, MarkLineComponent, TooltipComponent } from "echarts/components";
import { type ECharts, init, use } from "echarts/core";
import { CanvasRenderer } from "echarts/renderers";
import { type ReactNode, useEffect, useRef, useState } from "react";

import { csvOf, type Named, zoomed } from "../lib/chart";
import { type ChartOption, type ChartProps, type Ink, inkOf } from "./chart";
import { useShared } from "./context";
import { save } from "./save";

use([LineChart, DataZoomInsideComponent, GridComponent, LegendComponent, MarkLineComponent, TooltipComponent, CanvasRenderer]);

/** Charts that point together, by what their axis is. */
const linked = new Map<ECharts, string>();

/** Shows in the others what they have where this one is pointed at; null: nowhere any more. */
function point(from: ECharts, at: { x: number; y: number } | null): void {
  const kind = linked.get(from);
  const place = at && (from.convertFromPixel("grid", [at.x, at.y]) as number[] | undefined)?.[0];
  for (const [other, its] of linked) {
    if (other === from || !kind || its !== kind) continue;
    const x = place === null || place === undefined ? Number.NaN : (other.convertToPixel("grid", [place, 0])?.[0] ?? Number.NaN);
    if (Number.isFinite(x)) other.dispatchAction({ type: "showTip", x, y: other.getHeight() / 2 });
    else other.dispatchAction({ type: "hideTip" });
  }
}

export default function EChart(props: ChartProps): ReactNode {
  const { job } = useShared();
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
    made.getZr().on("mousemove", (event) => point(made, { x: event.offsetX, y: event.offsetY }));
    made.getZr().on("globalout", () => point(made, null));
    return () => {
      observer.disconnect();
      linked.delete(made);
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
  useEffect(() => {
    if (chart.current && props.link) linked.set(chart.current, props.link);
  }, [props.link]);
  const zoom = (next: [number, number]): void => {
    setSpan(next);
    chart.current?.dispatchAction({ type: "dataZoom", start: next[0], end: next[1] });
  };
  const csv = (): string => {
    if (props.csv) return props.csv();
    const found = (chart.current?.getOption() ?? {}) as { series?: Named[]; xAxis?: { name?: string }[]; yAxis?: { name?: string }[] };
    return csvOf(job, found.series ?? [], found.xAxis?.[0]?.name || "x", found.yAxis?.[0]?.name || "y");
  };
  const title = `${job}: ${props.label}`;
  const picture = (): void => {
    const drawing = box.current?.querySelector("canvas");
    if (drawing) titled(drawing, `${title}, ${new Date().toLocaleString("en-CA")}`).toBlob((blob) => blob && save(`${title}.png`, blob));
  };
  const whole = span[0] <= 0 && span[1] >= 100;
  return (
    <>
      <div ref={box} className="chart" role="img" aria-label={props.label} style={{ height: props.height }} />
      <div className="chart-tools" role="group" aria-label={`Tools of the chart: ${props.label}`}>
        {!props.small && (
          <>
            <button type="button" className="small" aria-label="Zoom in" onClick={() => zoom(zoomed(span, 0.5, 0))}>+</button>
            <button type="button" className="small" aria-label="Zoom out" disabled={whole} onClick={() => zoom(zoomed(span, 2, 0))}>−</button>
            <button type="button" className="small" aria-label="Earlier" disabled={span[0] <= 0} onClick={() => zoom(zoomed(span, 1, -0.5))}>←</button>
            <button type="button" className="small" aria-label="Later" disabled={span[1] >= 100} onClick={() => zoom(zoomed(span, 1, 0.5))}>→</button>
          </>
        )}
        {(!props.small || !whole) && <button type="button" className="small" disabled={whole} onClick={() => zoom(WHOLE)}>Whole</button>}
        <button type="button" className="small" onClick={() => save(`${title}.csv`, csv())}>CSV</button>
        {!props.small && <button type="button" className="small" onClick={() => void navigator.clipboard?.writeText(csv())}>Copy</button>}
        <button type="button" className="small" onClick={picture}>PNG</button>
      </div>
    </>
  );
}

const TITLE_PX = 26;

/** The drawing under a line that says what it is, on the ground of the page. */
function titled(drawing: HTMLCanvasElement, text: string): HTMLCanvasElement {
  const ratio = window.devicePixelRatio || 1;
  const made = document.createElement("canvas");
  [made.width, made.height] = [drawing.width, drawing.height + TITLE_PX * ratio];
  const pen = made.getContext("2d");
  const ink = inkOf();
  if (pen) {
    pen.fillStyle = ink.back;
    pen.fillRect(0, 0, made.width, made.height);
    pen.fillStyle = ink.text;
    pen.font = `${13 * ratio}px sans-serif`;
    pen.fillText(text, 8 * ratio, 18 * ratio);
    pen.drawImage(drawing, 0, TITLE_PX * ratio);
  }
  return made;
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
