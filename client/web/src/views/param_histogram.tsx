/** Histograms over steps, stacked (offset) or on top of each other (overlay). */

import { type ReactNode, useMemo } from "react";

import { tint } from "../lib/color";
import { count, number } from "../lib/format";
import { density, type Histogram, type Sample, spread } from "../lib/samples";
import { Choice, Empty, Panel } from "../ui/bits";
import { axis, Chart, type ChartOption, type Ink } from "../ui/chart";
import { useShared } from "../ui/context";
import { useQuery } from "../ui/hooks";

const MAX_OFFSET = 14;
const MAX_OVERLAY = 5;

export function HistogramPanel(props: { samples: readonly Sample[] }): ReactNode {
  const { samples } = props;
  const { dark } = useShared();
  const [mode, setMode] = useQuery("hist", "offset");
  const finite = useMemo(() => samples.filter(hasHistogram), [samples]);
  const shown = useMemo(() => spread(finite, mode === "overlay" ? MAX_OVERLAY : MAX_OFFSET), [finite, mode]);
  const without = samples.length - finite.length;
  const last = shown.at(-1);
  return (
    <Panel
      title="Histogram over steps"
      actions={<Choice label="Histograms" value={mode === "overlay" ? "overlay" : "offset"} options={[["offset", "Offset"], ["overlay", "Overlay"]] as const} onChange={setMode} />}
      source={
        <span className="source">
          {last && `${shown.length > 1 ? `steps ${count(shown[0]!.histogram.step)} to` : "step"} ${count(last.histogram.step)}, ${last.histogram.counts.length} bins`}
        </span>
      }
    >
      {without > 0 && <p className="source bad">At {count(without)} of {count(samples.length)} collected steps no element is finite: there is nothing to count then.</p>}
      {!last && without === 0 && <Empty>No sample yet; one is collected every 5 s while this view is open.</Empty>}
      {last && (
        <Chart
          label={`Histograms of ${shown.length} steps`}
          height={mode === "overlay" ? 240 : 140 + 18 * shown.length}
          deps={[shown, mode, dark]}
          option={(ink) => (mode === "overlay" ? overlay(ink, shown) : offset(ink, shown))}
        />
      )}
    </Panel>
  );
}

export type Counted = Sample & { histogram: Histogram };

export function hasHistogram(sample: Sample): sample is Counted {
  return sample.histogram !== null;
}

function label(sample: Counted): string {
  return `step ${count(sample.histogram.step)}`;
}

export function overlay(ink: Ink, samples: readonly Counted[]): ChartOption {
  return {
    legend: { top: 0, right: 0, textStyle: { color: ink.faint }, itemWidth: 14, itemHeight: 3, icon: "rect" },
    xAxis: axis(ink, "value", { type: "value", scale: true }),
    yAxis: axis(ink, "density", { type: "value", nameGap: 44 }),
    series: samples.map((sample, i) => ({
      type: "line",
      name: label(sample),
      step: "middle",
      showSymbol: false,
      lineStyle: { width: i === samples.length - 1 ? 2 : 1.2 },
      data: density(sample.histogram).map(([x, y]) => [round(x), round(y)]),
    })),
  };
}

/** Each histogram on its own baseline, the newest in front; all on one scale. */
function offset(ink: Ink, samples: readonly Counted[]): ChartOption {
  const all = samples.map((sample) => density(sample.histogram));
  const top = Math.max(...all.flat().map(([, y]) => y), Number.MIN_VALUE);
  const rise = 0.45;
  return {
    tooltip: { show: false },
    grid: { left: 84, right: 16, top: 12, bottom: 36 },
    xAxis: axis(ink, "value", { type: "value", scale: true }),
    yAxis: axis(ink, "", {
      type: "value",
      min: 0,
      max: (samples.length - 1) * rise + 1.05,
      interval: rise,
      splitLine: { show: false },
      axisLabel: {
        color: ink.faint,
        formatter: (value: number) => {
          const at = samples.length - 1 - Math.round(value / rise);
          const sample = samples[at];
          return sample && (at % Math.ceil(samples.length / 8) === 0 || at === samples.length - 1) ? count(sample.histogram.step) : "";
        },
      },
    }),
    // Oldest first: at the top, behind the others.
    series: samples.map((_, i) => {
      const base = (samples.length - 1 - i) * rise;
      return {
        type: "line",
        showSymbol: false,
        silent: true,
        z: i + 1,
        lineStyle: { width: 1, color: ink.series[0]! },
        itemStyle: { color: ink.series[0]! },
        areaStyle: { color: tint(ink.back, ink.series[0]!, 0.12 + (0.22 * (i + 1)) / samples.length), opacity: 0.92, origin: base },
        data: all[i]!.map(([x, y]) => [round(x), base + y / top]),
      };
    }),
  };
}

function round(value: number): number {
  return Number(number(value, 6).replace("–", "0")) || 0;
}
