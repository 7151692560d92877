/** Singular values of a weight, and its dead and equal rows. Asked for, never polled. */

import { type ReactNode, useState } from "react";

import { get } from "../api/client";
import type { Spectrum } from "../api/schema";
import { count, number, percent } from "../lib/format";
import { Empty, Facts, Panel, Source, Trouble } from "../ui/bits";
import { axis, Chart } from "../ui/chart";
import { useShared } from "../ui/context";
import { usePoll } from "../ui/hooks";

const VALUES = 16;

export function SpectrumPanel(props: { name: string; shape: readonly number[] }): ReactNode {
  const { name, shape } = props;
  const { job, dark } = useShared();
  const [asked, setAsked] = useState(0);
  const possible = shape.length >= 2;
  const spectrum = usePoll(
    asked > 0 ? `${job}/${name}/spectrum/${asked}` : null,
    (signal) => get("/api/v1/jobs/{job}/params/spectrum", { path: { job }, query: { name, k: VALUES }, signal }),
    0,
  );
  const found = spectrum.data;
  return (
    <Panel
      title="Spectrum"
      source={<Source what="/params/spectrum" at={spectrum.at} step={found?.step} incarnation={found?.incarnation} error={spectrum.error} busy={spectrum.busy} />}
      actions={
        <button type="button" disabled={!possible || spectrum.busy} onClick={() => setAsked(asked + 1)}>
          {found ? "Compute again" : "Compute"}
        </button>
      }
    >
      {spectrum.error && <Trouble>{spectrum.error}</Trouble>}
      {!found && !spectrum.error && (
        <Empty>{possible ? "Estimates the largest singular values." : "Only a matrix has singular values."}</Empty>
      )}
      {found && <Facts rows={factsOf(found)} />}
      {found && found.singular_values.length > 0 && (
        <Chart
          label={`The largest ${found.singular_values.length} singular values`}
          height={200}
          deps={[found, dark]}
          option={(ink) => ({
            xAxis: axis(ink, "number", { type: "category", data: found.singular_values.map((_, i) => String(i)) }),
            yAxis: axis(ink, "singular value", { type: "value", scale: true, nameGap: 50 }),
            series: [{ type: "line", symbolSize: 5, data: found.singular_values.map((value) => Number(value.toPrecision(6))) }],
          })}
        />
      )}
    </Panel>
  );
}

/** Title and text of each fact. */
export function factsOf(found: Spectrum): [string, string][] {
  const share = (part: number): string => percent(part, 1);
  const condition = found.condition === null ? (found.singular_values.length ? "infinite" : "–") : number(found.condition, 5);
  return [
    ["largest singular value", number(found.singular_values[0], 6)],
    ["stable rank", number(found.stable_rank, 5)],
    ["condition number", found.condition_exact ? condition : `at least ${condition}`],
    ["dead rows", listed(found.dead_rows, found.dead_row_count)],
    ["dead columns", listed(found.dead_columns, found.dead_column_count)],
    ["equal rows", found.duplicate_row_count ? `${count(found.duplicate_row_count)}: ${found.duplicate_rows.slice(0, 3).map((rows) => rows.slice(0, 4).join(" = ")).join("; ")}` : "none"],
    ["saturated, denormal", `${share(found.saturated)}, ${share(found.denormal)}`],
    ...(found.nonfinite ? [["NaN or infinite", count(found.nonfinite)] as [string, string]] : []),
  ];
}

function listed(items: readonly number[], all: number): string {
  if (!all) return "none";
  return `${count(all)}: ${items.slice(0, 8).join(", ")}${all > 8 ? ", …" : ""}`;
}
