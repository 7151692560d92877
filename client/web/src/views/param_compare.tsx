/** Two steps side by side: statistics, histograms, and a heat map of the change. */

import { type ReactNode, useEffect, useState } from "react";

import { colorer } from "../lib/color";
import { clock, count, number } from "../lib/format";
import { difference, type Heat, type Sample } from "../lib/samples";
import { STATISTICS, type Stats } from "../lib/stats";
import { Empty, Panel } from "../ui/bits";
import { Chart } from "../ui/chart";
import { useShared } from "../ui/context";
import { Pick } from "../ui/form";
import { useQuery } from "../ui/hooks";
import { hasHistogram, overlay } from "./param_histogram";

export function Compare(props: {
  samples: readonly Sample[];
  keep: (withHeat: boolean) => Promise<void>;
  mayRead: boolean;
}): ReactNode {
  const { samples, keep, mayRead } = props;
  const { dark } = useShared();
  const [a, setA] = useQuery("a");
  const [b, setB] = useQuery("b");
  const [busy, setBusy] = useState(false);
  const of = (step: string, fallback: Sample | undefined): Sample | undefined =>
    samples.find((sample) => String(sample.step) === step) ?? fallback;
  const options = samples.map(({ step, time_s, heat }): [string, string] => [String(step), `step ${count(step)}, ${clock(time_s)}${heat ? " ▦" : ""}`]);
  const before = of(a, samples[0]);
  const after = of(b, samples.at(-1));
  const both = before && after ? [before, after].filter(hasHistogram) : [];
  const change = before?.heat && after?.heat ? difference(before.heat, after.heat) : null;
  return (
    <Panel
      title="Compare two steps"
      actions={
        <button
          type="button"
          disabled={busy}
          onClick={() => {
            setBusy(true);
            void keep(mayRead).finally(() => setBusy(false));
          }}
        >
          {mayRead ? "Keep this step with its heat map" : "Keep this step"}
        </button>
      }
      source={<span className="source">steps collected by this page</span>}
    >
      {samples.length < 2 || !before || !after ? (
        <Empty>Only one step so far. Keep another one to compare.</Empty>
      ) : (
        <>
          <div className="bar-row">
            <Pick label="from" value={String(before.step)} options={options} onPick={setA} />
            <Pick label="to" value={String(after.step)} options={options} onPick={setB} />
          </div>
          <Table before={before} after={after} />
          {both.length > 0 && <Chart label="Both histograms" height={220} deps={[before, after, dark]} option={(ink) => overlay(ink, both)} />}
          {both.length < 2 && <p className="faint">A step without a finite element has no histogram.</p>}
          {change && <Change heat={change} dark={dark} />}
          {!change && mayRead && (
            <p className="faint">Keep both steps with their heat maps to see the change cell by cell.</p>
          )}
        </>
      )}
    </Panel>
  );
}

const ROWS: readonly { key: keyof Stats; title: string }[] = [
  ...STATISTICS,
  { key: "nan_count", title: "NaN" },
  { key: "inf_count", title: "Inf" },
];

function Table(props: { before: Sample; after: Sample }): ReactNode {
  const { before, after } = props;
  const rows = ROWS.map(({ key, title }) => {
    const [x, y] = [before.stats[key], after.stats[key]];
    const delta = x === null || y === null ? null : y - x;
    const share = delta === null || !x ? null : (100 * delta) / Math.abs(x);
    return { key, title, x, y, delta, share };
  });
  return (
    <div className="scroll">
      <table className="plain narrow" aria-label="Change">
        <thead>
          <tr>
            <th>of</th>
            <th className="num">step {count(before.step)}</th>
            <th className="num">step {count(after.step)}</th>
            <th className="num">change</th>
            <th className="num">in %</th>
          </tr>
        </thead>
        <tbody>
          {rows.map((row) => (
            <tr key={row.key}>
              <td>{row.title}</td>
              <td className="num">{number(row.x, 6)}</td>
              <td className="num">{number(row.y, 6)}</td>
              <td className="num">{number(row.delta, 4)}</td>
              <td className="num">{row.share === null ? "–" : `${number(row.share, 3)} %`}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

/** A heat map of differences, 0 in the middle of the scale. */
export function Change(props: { heat: Heat; dark: boolean }): ReactNode {
  const { heat, dark } = props;
  const [canvas, setCanvas] = useState<HTMLCanvasElement | null>(null);
  const most = Math.max(0, ...heat.values.map((value) => Math.abs(value ?? 0)));
  useEffect(() => {
    if (!canvas) return;
    canvas.width = heat.cell_col_count;
    canvas.height = heat.cell_row_count;
    const pen = canvas.getContext("2d");
    if (!pen) return;
    const image = pen.createImageData(heat.cell_col_count, heat.cell_row_count);
    const color = colorer(-most, most, { signed: true, dark });
    heat.values.forEach((value, i) => image.data.set([...(value === null ? [128, 128, 128] : color(value)), 255], i * 4));
    pen.putImageData(image, 0, 0);
  }, [canvas, heat, most, dark]);
  return (
    <figure className="heat" style={{ margin: 0 }}>
      <canvas ref={setCanvas} role="img" aria-label="Change of each cell's mean" style={{ height: 220 }} />
      <figcaption className="readout">change of each cell's mean, from {number(-most)} to {number(most)}</figcaption>
    </figure>
  );
}
